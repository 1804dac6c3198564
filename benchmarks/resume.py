"""Hash tables of resume: a run that never stopped beside runs that were stopped and went on, for every backend that the package ships.

    python benchmarks/resume.py --json resume.json

Exact: RL and SFT, on two ranks where the backend has more than one. The straight run saves its end only. Another saves after every step,
in the background; copies of its directory go on after a step in the middle of an epoch, and after one at the border of two. Hashes are of
parameters, of moments and the step count, of losses with gradient norms, of learning rates, and of the token ids of every step.

Elastic: what two ranks have saved is loaded by one and by four, and what `ddp` has saved by `fsdp2` and then by `single`. Parameters and
moments, saved again by those who have loaded them, hash as what was saved. Two steps on, the prompts drawn and the identities by which
their samples are drawn (seed, group, index) are those of the run that never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch
from rich.console import Console
from rich.table import Table

from drumroll import config as configs
from drumroll import plugins
from drumroll.backends.base import RankContext
from drumroll.backends.state import MODEL
from drumroll.backends.state import read as read_tensors
from drumroll.checkpoint.identity import fingerprint
from drumroll.checkpoint.store import CheckpointStore, name_of
from drumroll.config import RunConfig
from drumroll.errors import UserError
from drumroll.observe.checks import CheckRow, at_most
from drumroll.observe.run import read_rollouts, read_steps
from drumroll.pipelines import resume, rl, sft
from drumroll.runtime.local import launch
from drumroll.runtime.plan import Plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec

RANKS, OTHERS = 2, (1, 4)
STEPS, ROWS, DRAWS = 6, 10, 4  # 4 rows a step of 10: step 2 ends within the first epoch, step 5 with the second
STOPS = {"mid-epoch": 2, "epoch border": 5}
CHAIN = ("ddp", "fsdp2", plugins.SPECIFICATION_BACKEND)
PARTS = ("parameters", "moments", "losses", "rates", "tokens")
SHOWN = 8  # hexadecimal digits

_REWARD = '''import random

def digits(rollout, prompt):
    """Some of it by chance: the driver's random numbers are part of what a run goes on with."""
    return sum(c.isdigit() for c in rollout.text) / 6 + random.random() / 10
'''
_COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "model": {"path": "builtin:llama-0.8m"},
    "data": {"train": {"task": "sort", "options": {"digits": 3}, "rows": ROWS}, "max_prompt_tokens": 24},
    "optim": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
}
_OF_PIPELINE: dict[str, dict[str, Any]] = {
    "rl": {
        "rollout": {"prompts_per_step": DRAWS, "max_tokens": 6},
        "engine": {"name": plugins.EMBEDDED_ENGINE},
        "algorithm": {"name": "grpo", "group_size": 4, "kl": {"coef": 0.01}, "minibatches": 2},
    },
    "sft": {"rollout": {"max_tokens": 6}, "train": {"batch_size": DRAWS}},
}


@dataclass(slots=True, frozen=True)
class Place:
    """Where a run computes."""

    backend: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.backend} x {self.ranks}"


@dataclass(slots=True, frozen=True)
class Line:
    """One line of a table: what was done, and the hashes of what came of it beside those that it has to have: none of a straight run."""

    place: Place
    pipeline: str
    run: str
    hashes: Mapping[str, str]
    expected: Mapping[str, str]

    @property
    def differ(self) -> list[str]:
        return [part for part, value in self.expected.items() if self.hashes[part] != value]

    def row(self) -> CheckRow:
        options = {"pipeline": self.pipeline, "run": self.run, **{part: value[:16] for part, value in self.hashes.items()}}
        options |= {f"{part}, expected": self.expected[part][:16] for part in self.differ}
        return at_most("hashes that differ", len(self.differ), 0, backend=self.place.backend, options=options, ranks=self.place.ranks)


@dataclass(slots=True, frozen=True)
class Bench:
    folder: Path  # of all runs

    def config(self, pipeline: str, place: Place, run_dir: Path, every: int = 1, steps: int = STEPS) -> RunConfig:
        tree = _COMMON | _OF_PIPELINE[pipeline] | {
            "pipeline": pipeline,
            "max_steps": steps,
            "run_dir": str(run_dir),
            "backend": {"name": place.backend},
            "runtime": {"ranks": place.ranks, "device": "cpu"},
            "checkpoint": {"every": every, "keep": STEPS},
        }  # fmt: skip
        if pipeline == "rl":
            tree["rewards"] = [{"fn": f"{self.folder}/reward.py:digits", "isolate": False}]
        return configs.parse(tree)

    def run_dir(self, pipeline: str, place: Place, name: str) -> Path:
        return self.folder / f"{pipeline}-{place.backend}-{place.ranks}-{name}".replace(" ", "-")

    def exact(self, pipeline: str, place: Place) -> Iterator[Line]:
        """The straight run, the one that saves after every step, and what goes on from copies of that one."""
        straight, saving = (self.run_dir(pipeline, place, name) for name in ("straight", "saving"))
        train(self.config(pipeline, place, straight, every=STEPS))
        train(self.config(pipeline, place, saving))
        expected = hashes_of_run(straight)
        line = partial(Line, place, pipeline, expected=expected)
        yield Line(place, pipeline, "straight", expected, {})
        yield line("saves after every step", hashes_of_run(saving))
        for name, stop in STOPS.items():
            resumed = self.run_dir(pipeline, place, name)
            shutil.copytree(saving, resumed)
            go_on(self.config(pipeline, place, resumed), stop, exact=True)
            yield line(f"resumed after {stop}, {name}", hashes_of_run(resumed))

    def elastic(self, route: Sequence[Place]) -> Iterator[Line]:
        """From the first place's run to each further one in turn, two steps at each."""
        origin = self.run_dir("rl", route[0], "saving")
        run_dir, stop = self.folder / "-".join(f"{place.backend}{place.ranks}" for place in route), min(STOPS.values())
        shutil.copytree(origin, run_dir)
        for before, place in itertools.pairwise(route):
            config = self.config("rl", place, run_dir, steps=stop + 2)
            saved = run_dir / resume.CHECKPOINTS_DIR / name_of(stop)
            loaded = self.loaded(config, saved)
            go_on(config, stop, exact=False)
            stop += 2
            hashes = hashes_of_state(loaded) | {"draws": hash_of_draws(run_dir, stop)}
            expected = hashes_of_state(saved) | {"draws": hash_of_draws(origin, stop)}
            yield Line(place, "rl", f"saved by {before}", hashes, expected)

    def loaded(self, config: RunConfig, saved: Path) -> Path:
        """What the ranks of `config` hold when they have loaded `saved`, saved again by them; its directory."""
        found = resume.find(config, saved)
        assert found is not None
        spec = WorkerSpec(config, found.folder, Plan(config.runtime.ranks, frozenset({"policy"})))
        store = CheckpointStore(Path(tempfile.mkdtemp(dir=self.folder)), config.checkpoint)
        with launch(partial(Worker, spec=spec), config.runtime.ranks, "cpu") as ranks:
            policy = Policy(ranks, config, total_steps=1)
            policy.restore(found.checkpoint, found.state, generators=False)
            draft = store.draft(found.state, config, fingerprint(found.folder), {}, [])
            policy.save(store, draft, background=False)
        return store.folder / saved.name


def train(config: RunConfig, resumed: resume.Resumed | None = None) -> None:
    """Without a word, unless it fails."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        {"rl": rl.train, "sft": sft.train}[config.pipeline](config, resumed)


def go_on(config: RunConfig, stop: int, exact: bool) -> None:
    """Resume after step `stop` and train to the end. `exact`: the contract that it has to promise."""
    found = resume.find(config, Path(config.run_dir) / resume.CHECKPOINTS_DIR / name_of(stop))
    assert found is not None and found.exact == exact, found
    train(config, found)


def hashes_of_run(run_dir: Path) -> dict[str, str]:
    """Of a run's end, and of all its steps, those before a stop included."""
    steps = read_steps(run_dir)
    assert [record.step for record in steps] == list(range(1, STEPS + 1)), "a step is missing, or stands twice"
    rollouts = [(r.step, r.phase, r.group_id, r.index, r.token_ids) for r in read_rollouts(run_dir)]
    return hashes_of_state(run_dir / resume.CHECKPOINTS_DIR / name_of(STEPS)) | {
        "losses": _hash([(record.loss, record.grad_norm) for record in steps]),
        "rates": _hash([record.lr for record in steps]),
        "tokens": _hash([[record.tokens_digest for record in steps], rollouts]),
    }


def hashes_of_state(checkpoint: Path) -> dict[str, str]:
    """Of every tensor with its name, dtype and shape."""
    parts = {"parameters": hashlib.sha256(), "moments": hashlib.sha256()}
    for name, tensor in sorted(read_tensors(checkpoint / "state").items()):
        part = parts["parameters" if name.startswith(MODEL) else "moments"]
        part.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        part.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {name: part.hexdigest() for name, part in parts.items()}


def hash_of_draws(run_dir: Path, steps: int) -> str:
    """Which prompts the first steps drew, and by which identities each response was sampled."""
    seed = configs.load(run_dir / "config.yaml").seed
    rollouts = (r for r in read_rollouts(run_dir) if r.phase == "train" and r.step <= steps)
    return _hash([(seed, r.step, r.group_id, r.prompt_id, r.index) for r in rollouts])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def places() -> list[Place]:
    """Every backend of the package, on two ranks, or on one where it has no more."""
    names = (name for name in plugins.names("backends") if not plugins.for_tests("backends", name))
    return [Place(name, RANKS if runs_on(name, RANKS) else 1) for name in names]


def runs_on(backend: str, ranks: int) -> bool:
    """Whether the backend, with the options that it has by itself, runs on so many ranks."""
    plugin = plugins.load("backends", backend)
    try:
        plugin.placement(plugin.Config()).check(RankContext(0, ranks, torch.device("cpu")))
    except UserError:
        return False
    return True


def table(lines: Sequence[Line], parts: Sequence[str], title: str) -> Table:
    """The first digits of each hash; what differs is red."""
    grid = Table(title=title, title_justify="left", header_style="bold")
    for name in ("place", "pipeline", "run", *parts):
        grid.add_column(name, no_wrap=True)
    for index, line in enumerate(lines):
        cells = (f"[bold red]{line.hashes[part][:SHOWN]}[/]" if part in line.differ else line.hashes[part][:SHOWN] for part in parts)
        last = index + 1 == len(lines) or (lines[index + 1].place.backend, lines[index + 1].pipeline) != (line.place.backend, line.pipeline)
        grid.add_row(str(line.place), line.pipeline, line.run, *cells, end_section=last)
    return grid


def summary(lines: Sequence[Line], check: str) -> list[CheckRow]:
    """A row a backend and number of ranks: of all its lines, how many hashes differ."""
    by_place: dict[Place, list[Line]] = {}
    for line in lines:
        by_place.setdefault(line.place, []).append(line)
    return [
        at_most(f"{check}: hashes that differ", sum(len(line.differ) for line in found), 0, backend=place.backend, ranks=place.ranks,
                options={"of": sum(len(line.expected) for line in found)})
        for place, found in by_place.items()
    ]  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--backend", action="append", help="only this backend; may be given several times")
    arguments = parser.parse_args()
    common.announce()
    chosen = [place for place in places() if arguments.backend is None or place.backend in arguments.backend]
    spread = [place for place in chosen if place.ranks == RANKS]
    with tempfile.TemporaryDirectory(prefix="drumroll-resume-") as name:
        bench = Bench(Path(name))
        (bench.folder / "reward.py").write_text(_REWARD)
        exact = [line for place in chosen for pipeline in _OF_PIPELINE for line in bench.exact(pipeline, place)]
        routes = [(place, Place(place.backend, ranks)) for place in spread for ranks in OTHERS]
        chain = tuple(Place(backend, RANKS if runs_on(backend, RANKS) else 1) for backend in CHAIN)
        routes += [chain] if chain[0] in chosen else []
        elastic = [line for route in routes for line in bench.elastic(route)]
    console = Console(width=140)
    console.print(table(exact, PARTS, f"exact: {STEPS} steps, {ROWS} rows, {DRAWS} a step"))
    console.print(table(elastic, ("parameters", "moments", "draws"), "elastic: after loading, and two steps on"))
    rows = [*summary(exact, "exact"), *summary(elastic, "elastic")]
    common.report(rows, "resume", arguments.json, [line.row() for line in (*exact, *elastic) if line.expected])


if __name__ == "__main__":
    main()
