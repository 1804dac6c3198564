"""A run that is to be killed: `python benchmarks/kills.py PLAN.json`, started by `crash.py`; and who can be killed.

Nothing is killed from here but this run's own processes: a plan names a stage of a save, at which one of them, or all, get SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Target = Literal["rank", "driver", "everything"]
_START = 19  # of the fields of `_stat`: clock ticks from boot to the process's start
STAGES = ("drafted", "written", "described", "renamed", "rotated")  # of a save, in their order (`CheckpointStore`)


@dataclass(slots=True, frozen=True)
class Plan:
    """What the run does, and what happens to it."""

    recipe: str
    overrides: tuple[str, ...]
    target: Target | None = None  # None: it is killed from outside, or not at all
    stage: str = ""
    step: int = 0  # in the first save of this step or a later one
    done: str = ""  # a file that is there once it has happened: a run that starts itself again is not killed twice


@dataclass(slots=True, frozen=True)
class KillAt:
    """Told each stage of each save, in the process where it happens: the driver or rank 0."""

    target: Target
    stage: str
    step: int
    folder: str  # of the checkpoints
    driver: int
    done: str

    def __call__(self, stage: str) -> None:
        if stage != self.stage or self._step() < self.step or Path(self.done).exists():
            return
        Path(self.done).write_text(f"{stage} {self._step()}")
        kill(self.target, self.driver)

    def _step(self) -> int:
        """Of the save under way: the newest directory is its own, whatever it is called by now."""
        names = (path.name.rpartition("-")[2] for path in Path(self.folder).iterdir() if not path.name.startswith("abandoned"))
        return max((int(name) for name in names if name.isdigit()), default=0)


def kill(target: Target, driver: int, index: int = 0) -> bool:
    """SIGKILL to a rank, by `index`, to the driver, or to its whole process group. False: it is gone, or not there yet."""
    try:
        if target == "everything":
            os.killpg(driver, signal.SIGKILL)
        elif target == "driver":
            os.kill(driver, signal.SIGKILL)
        elif living := ranks(driver):
            os.kill(living[index % len(living)], signal.SIGKILL)
        else:
            return False
    except ProcessLookupError:
        return False
    return True


def end(pid: int) -> None:
    """SIGKILL to what should have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ranks(driver: int) -> list[int]:
    """Process ids of a driver's ranks, which are forked from a server of its own."""
    parents = _parents()
    servers = [pid for pid, parent in parents.items() if parent == driver]
    return sorted(pid for pid, parent in parents.items() if parent in servers)


def family(driver: int) -> set[tuple[int, str]]:
    """The driver and all below it that live: process id and start time, which together are never given again."""
    stat = _stat()
    found = {driver}
    while more := {pid for pid, fields in stat.items() if int(fields[1]) in found} - found:
        found |= more
    return {(pid, stat[pid][_START]) for pid in found if pid in stat}


def living() -> set[tuple[int, str]]:
    """All processes of this machine."""
    return {(pid, fields[_START]) for pid, fields in _stat().items()}


def _parents() -> dict[int, int]:
    return {pid: int(fields[1]) for pid, fields in _stat().items()}


def _stat() -> dict[int, list[str]]:
    """Process id -> fields of /proc/PID/stat from the third on: state, parent, ...; zombies, which wait for their parent, are left out."""
    found: dict[int, list[str]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            found[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
    return {pid: fields for pid, fields in found.items() if fields[0] != "Z"}


def run(plan: Plan) -> None:
    """`drumroll train RECIPE --resume`, with an ear at the stages of its saves."""
    from drumroll import config, plugins
    from drumroll.checkpoint.store import unheard
    from drumroll.pipelines import resume, rl, sft

    recipe = config.load(plan.recipe, plan.overrides)
    plugins.check(recipe, plan.recipe)
    found = resume.find(recipe, None)
    print(found.words() if found is not None else "resume: no checkpoint yet", flush=True)
    folder = str(Path(recipe.run_dir) / resume.CHECKPOINTS_DIR)
    hook = KillAt(plan.target, plan.stage, plan.step, folder, os.getpid(), plan.done) if plan.target else unheard
    {"rl": rl.train, "sft": sft.train}[recipe.pipeline](recipe, found, hook)


def write(plan: Plan, file: Path) -> Path:
    """For `main` of a child."""
    file.write_text(json.dumps(asdict(plan)))
    return file


def main() -> None:
    """Exit codes are those of the command line."""
    from drumroll.errors import RunError, UserError

    try:
        run(Plan(**json.loads(Path(sys.argv[1]).read_text())))
    except UserError as error:
        sys.exit(f"error: {error}")
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    # Under its own name, not as __main__: what is sent to ranks is found by name there.
    import kills

    kills.main()
