"""Kill runs at random moments and hold what comes of them against a run that was never killed.

    python benchmarks/crash.py --kills 50 --seed 0 --json crash.json

SIGKILL to a rank, to the driver, or to the whole process group; half of them at a stage of a save, half at a random moment (while the
processes start, while it trains). Then `--resume`, and the next kill, up to `_KILLS_A_RUN` of them; then the run may end. Half of the ranks
killed are for the driver to restart by itself (`runtime.max_restarts`). After each kill: nothing is left running, a checkpoint is found, no
more steps are lost than lie between two saves. At the end of each run: parameters, records and rollouts are bit-equal to those of the
run that was never killed.

The same seed gives the same plan; at what moment a kill meets a run depends on the machine. Linux only (/proc).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import common
import kills
import yaml
from kills import STAGES, Plan, Target

from drumroll import config as configs
from drumroll.observe.checks import CheckRow, at_most, measured
from drumroll.observe.run import read_rollouts, read_run, read_steps
from drumroll.pipelines import resume

RANKS, STEPS, EVERY = 2, 16, 2
ANY = "any moment"
_KILLS_A_RUN = 5
_RUN_S = 120.0  # a run that takes longer hangs
_GONE_S = 15.0  # how long processes may take to end
_POLL_S = 0.05

T = TypeVar("T")

_REWARD = '''import random

def digits(rollout, prompt):
    """Some of it by chance: the driver's random numbers are part of what a run goes on with."""
    return sum(c.isdigit() for c in rollout.text) / 6 + random.random() / 10

def letters(rollout, prompt):
    return sum(c.isalpha() for c in rollout.text) / 6
'''


@dataclass(slots=True, frozen=True)
class Subject:
    """What is killed."""

    pipeline: str
    backend: str
    async_save: bool = True

    @property
    def options(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline, "every": EVERY, "async_save": self.async_save}

    @property
    def name(self) -> str:
        return f"{self.pipeline}-{self.backend}"


SUBJECTS = (Subject("rl", "ddp"), Subject("sft", "fsdp2"), Subject("rl", "fsdp2", async_save=False))


@dataclass(slots=True)
class Tally:
    """What was seen of one subject."""

    kills: Counter[str] = field(default_factory=Counter)  # by target
    moments: Counter[str] = field(default_factory=Counter)  # stage, or ANY
    runs: int = 0
    lost: int = 0  # most steps done again after one kill
    beyond: int = 0  # most of them beyond the interval
    left: int = 0  # processes that outlived a kill
    unclear: int = 0  # killed ranks of which the driver did not speak
    failed: int = 0  # resumed runs that did not go on
    slowest: float = 0.0  # seconds from the kill of a rank or the driver until all had ended
    other_parameters: int = 0  # runs
    other_records: int = 0


def recipe(subject: Subject, folder: Path) -> Path:
    """A recipe small enough that a run takes seconds."""
    tree: dict[str, Any] = {
        "pipeline": subject.pipeline,
        "max_steps": STEPS,
        "run_dir": "overridden",
        "model": {"path": "builtin:llama-0.8m"},
        "data": {"train": {"task": "sort", "options": {"digits": 3}, "rows": 10}, "max_prompt_tokens": 24},
        "rollout": {"max_tokens": 6},
        "optim": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
        "backend": {"name": subject.backend},
        "runtime": {"ranks": RANKS, "device": "cpu", "timeout_s": _RUN_S},
        "checkpoint": {"every": EVERY, "keep": 2, "async_save": subject.async_save},
    }
    if subject.pipeline == "sft":
        tree["train"] = {"batch_size": 8}
    else:
        tree["rollout"] |= {"prompts_per_step": 4}
        tree["engine"] = {"name": "transformers"}
        tree["rewards"] = [{"fn": f"{folder}/reward.py:digits", "isolate": False}, {"fn": f"{folder}/reward.py:letters", "timeout_s": 60.0}]
        tree["algorithm"] = {"name": "grpo", "group_size": 2, "minibatches": 2}
    file = folder / f"{subject.name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@dataclass(slots=True)
class Deck(Generic[T]):
    """Cards in random order, each once before any comes again: what is rare gets its turn."""

    cards: Sequence[T]
    chance: random.Random
    _left: list[T] = field(default_factory=list)

    def draw(self) -> T:
        if not self._left:
            self._left = self.chance.sample(self.cards, len(self.cards))
        return self._left.pop()


class Attempt:
    """One start of a run, from a checkpoint or from the beginning, and its end."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        file = kills.write(plan, scratch / "plan.json")
        self.log = (scratch / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(kills.__file__)), str(file)], stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.ended: float | None = None
        self._seen: set[tuple[int, str]] = set()

    def watch(self) -> bool:
        """Remember the processes there are; whether the driver still lives."""
        self._seen |= kills.family(self.process.pid)
        return self.process.poll() is None

    def outlived(self) -> int:
        """How many of its processes are still there `_GONE_S` after the driver has ended; they are ended."""
        deadline = time.monotonic() + _GONE_S
        while (left := self._seen & kills.living()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for pid, _ in left:
            kills.end(pid)
        return len(left)

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()


def run_until(attempt: Attempt, target: Target | None, moment: float, training: Path | None, index: int) -> float | None:
    """Wait for the end. `target`: it is killed `moment` seconds after its start, or after the file `training` has grown.

    Returns when that was, None where nothing was killed.
    """
    size = training.stat().st_size if training is not None and training.is_file() else 0
    started, since, killed = time.monotonic(), None if training is not None else time.monotonic(), None
    while attempt.watch():
        now = time.monotonic()
        if since is None and training is not None and training.is_file() and training.stat().st_size > size:
            since = now
        if target is not None and killed is None and since is not None and now - since > moment:
            killed = now if kills.kill(target, attempt.process.pid, index) else None
        if now - started > _RUN_S:
            kills.kill("everything", attempt.process.pid)
        time.sleep(_POLL_S)
    return killed


class Subjected:
    """A subject, its run that was never killed, and the runs that are."""

    def __init__(self, subject: Subject, folder: Path, chance: random.Random, whom: Deck[tuple[Target, int]], when: Deck[str]) -> None:
        self.subject, self.tally = subject, Tally()
        self._folder, self._chance, self._whom, self._when = folder, chance, whom, when
        self._recipe = recipe(subject, folder)
        self._straight = folder / f"{subject.name}-straight"
        self._scratch = folder / f"{subject.name}-scratch"
        self._scratch.mkdir()
        self._starting = self._training = 0.0  # seconds of the run that was never killed

    def _run_straight(self) -> None:
        started = time.monotonic()
        attempt = Attempt(self._plan(self._straight), self._scratch)
        run_until(attempt, None, 0.0, None, 0)
        if attempt.process.returncode != 0:
            sys.exit(f"{self.subject.name}: the run that nothing is done to fails:\n{attempt.text()}")
        steps = read_steps(self._straight)
        self._training = steps[-1].time - steps[0].time
        self._starting = time.monotonic() - started - self._training

    def _plan(self, run_dir: Path, restarts: int = 0) -> Plan:
        return Plan(str(self._recipe), (f"run_dir={run_dir}", f"runtime.max_restarts={restarts}"))

    def run(self, wanted: int) -> int:
        """One run, killed at most `wanted` times; returns how often it was."""
        if not self._training:
            self._run_straight()
        self.tally.runs += 1
        run_dir = self._folder / f"{self.subject.name}-{self.tally.runs}"
        done = 0
        while True:
            target, restarts = self._whom.draw() if done < min(wanted, _KILLS_A_RUN) else (None, 0)
            attempt, killed = self._attempt(run_dir, target, restarts)
            done += killed is not None
            ended = attempt.process.returncode == 0
            self._after(attempt, run_dir, target if killed is not None else None, killed, restarts)
            if ended:
                self._compare(run_dir)
                return done
            if killed is None:
                self.tally.failed += 1
                print(f"{self.subject.name}: a run that was not killed ended with {attempt.process.returncode}:\n{attempt.text()}")
                return done

    def _attempt(self, run_dir: Path, target: Target | None, restarts: int) -> tuple[Attempt, float | None]:
        """Start, and kill by the plan. The second value: when it was, None where it came to nothing."""
        chance, plan, marker = self._chance, self._plan(run_dir, restarts), self._scratch / "done"
        marker.unlink(missing_ok=True)
        index, moment = chance.randrange(RANKS), chance.random()
        stage = self._when.draw() if target is not None else ANY
        if stage != ANY:
            step = min(STEPS, newest(run_dir) + EVERY * chance.randint(1, 3))
            attempt = Attempt(replace(plan, target=target, stage=stage, step=step, done=str(marker)), self._scratch)
            run_until(attempt, None, 0.0, None, 0)
            if marker.is_file():
                self.tally.moments[stage] += 1
            return attempt, marker.stat().st_mtime - time.time() + time.monotonic() if marker.is_file() else None
        attempt = Attempt(plan, self._scratch)
        early = chance.random() < 0.3  # while processes start
        seconds, training = (self._starting, None) if early else (self._training, run_dir / "metrics.jsonl")
        killed = run_until(attempt, target, moment * seconds, training, index)
        if killed is not None:
            self.tally.moments[ANY] += 1
        return attempt, killed

    def _after(self, attempt: Attempt, run_dir: Path, target: Target | None, killed: float | None, restarts: int) -> None:
        """What must hold after every kill."""
        tally, code = self.tally, attempt.process.returncode
        tally.left += attempt.outlived()
        if target is None or killed is None:
            return
        tally.kills[target] += 1
        if target != "everything" and code != 0:
            tally.slowest = max(tally.slowest, time.monotonic() - killed)
        if target == "rank" and code != 0 and (restarts or "failed: rank " not in attempt.text()):
            tally.unclear += 1
            print(f"{self.subject.name}: a rank was killed (max_restarts={restarts}), and the driver ended with {code}:\n{attempt.text()}")
        if code == 0:
            return
        found = resume.find(configs.load(self._recipe, (f"run_dir={run_dir}",)), None)
        valid, done, begun = found.state.step if found is not None else 0, len(read_steps(run_dir)), newest(run_dir)
        tally.lost = max(tally.lost, done - valid)
        tally.beyond = max(tally.beyond, done - valid - EVERY - max(0, done - begun if begun > valid else 0))

    def _compare(self, run_dir: Path) -> None:
        mine, other = (path / "model" / "model.safetensors" for path in (run_dir, self._straight))
        self.tally.other_parameters += mine.read_bytes() != other.read_bytes()
        self.tally.other_records += numbers(run_dir) != numbers(self._straight)

    def rows(self) -> list[CheckRow]:
        """What was counted; zero everywhere but in what is only measured."""
        tally = self.tally
        where: dict[str, Any] = {"backend": self.subject.backend, "options": self.subject.options, "ranks": RANKS}
        moments = [moment for moment in (*STAGES, ANY) if tally.moments[moment]]
        return [
            *(measured(f"kills of {target}", count, **where) for target, count in sorted(tally.kills.items())),
            *(measured(f"kills at: {moment}", tally.moments[moment], **where) for moment in moments),
            measured("runs", tally.runs, **where),
            at_most("resumes that failed", tally.failed, 0, **where),
            at_most("killed ranks that the driver did not report or restart", tally.unclear, 0, **where),
            at_most("processes left running", tally.left, 0, **where),
            measured("most seconds from a kill until all had ended", tally.slowest, **where),
            measured("most completed steps done again after a kill", tally.lost, **where),
            at_most("completed steps lost beyond the save interval", tally.beyond, 0, **where),
            at_most("runs with other final parameters", tally.other_parameters, 0, **where),
            at_most("runs with other records or rollouts", tally.other_records, 0, **where),
        ]


def newest(run_dir: Path) -> int:
    """The newest step of which a save has begun."""
    names = (path.name.rpartition("-")[2] for path in (run_dir / resume.CHECKPOINTS_DIR).glob("s*-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def numbers(run_dir: Path) -> list[Any]:
    """All records but time and memory, each step once, and every rollout."""
    phases = [f"seconds_{phase}" for phase in ("generate", "reward", "logprobs", "train", "sync", "total")]
    idle = dict.fromkeys(("time", "tokens_per_second", *phases), 0.0)
    lines = len((run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [replace(record, peak_bytes=0, **idle) for record in read_run(run_dir).steps]  # type: ignore[arg-type]
    return [lines, steps, list(read_rollouts(run_dir))]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many, over all subjects (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan (default: %(default)s)")
    arguments = parser.parse_args()
    common.announce()
    chance, done = random.Random(arguments.seed), 0
    with tempfile.TemporaryDirectory(prefix="drumroll-crash-") as name:
        folder = Path(name)
        (folder / "reward.py").write_text(_REWARD)
        whom = Deck[tuple[Target, int]]((("rank", 0), ("rank", 1), ("driver", 0), ("everything", 0)), chance)
        when = Deck((*STAGES, *[ANY] * len(STAGES)), chance)
        subjects = [Subjected(subject, folder, chance, whom, when) for subject in SUBJECTS]
        while done < arguments.kills:
            subject = subjects[sum(one.tally.runs for one in subjects) % len(subjects)]
            done += subject.run(arguments.kills - done)
            print(json.dumps({"kills": done, "of": arguments.kills}), file=sys.stderr)
        rows = [row for subject in subjects if subject.tally.runs for row in subject.rows()]
    common.report(rows, f"{done} kills, seed {arguments.seed}", arguments.json)


if __name__ == "__main__":
    main()
