"""How long training waits for a checkpoint: in the background against written while it waits; and the rates beside a plain copy of files.

    python benchmarks/save.py

A stall is what the loop waits: until the driver may begin the next step. Both kinds of save alternate, an optimizer step between them, as
what a save copies has just been written. Saves of both kinds end on the disk (fsync) with their SHA-256 in a manifest; a plain copy is that
of the same files, with fsync and without a digest. Reads of both come from the page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np

from drumroll import config as configs
from drumroll import plugins
from drumroll.algorithms.loss import sft_loss
from drumroll.checkpoint import rng
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.identity import Fingerprint, fingerprint
from drumroll.checkpoint.store import Checkpoint
from drumroll.config import RunConfig
from drumroll.data.stream import Cursor
from drumroll.models.locate import locate
from drumroll.observe.checks import CheckRow, at_most, measured
from drumroll.pipelines.resume import store_of
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import TrainSample

MODEL, TOKENS, ROWS = "builtin:llama-24m", 96, 8
STALL = 0.20  # of a synchronous save
SUBJECTS = ((plugins.SPECIFICATION_BACKEND, 1), ("fsdp2", 2))
_MB = 1e6


@dataclass(slots=True)
class Bench:
    """A policy that trains and saves, and what its saves took."""

    config: RunConfig
    model: Fingerprint
    policy: Policy
    step: int = 0
    bytes: int = 0

    def train(self) -> float:
        """One optimizer step; its seconds."""
        random = np.random.default_rng(self.step)
        mask = np.arange(TOKENS) >= 16
        batch = [TrainSample(random.integers(4, 66, TOKENS, dtype=np.int64), mask, group_id=row) for row in range(ROWS)]
        started = time.perf_counter()
        self.policy.step(batch, sft_loss)
        self.step += 1
        return time.perf_counter() - started

    def save(self, background: bool) -> tuple[float, list[float], float]:
        """Seconds of stall, of each step done while it was being written, and until it was valid."""
        state = DriverState(self.step, self.policy.applied_steps, 0, self.policy.version, Cursor())
        store, started = store_of(self.config), time.perf_counter()
        draft = store.draft(state, self.config, self.model, rng.capture(), self.policy.generators())
        self.policy.save(store, draft, background)
        stall, steps = time.perf_counter() - started, []
        while not self.policy.saved():
            if background:
                steps.append(self.train())
            else:
                time.sleep(0.002)
        whole = time.perf_counter() - started
        self.bytes = sum(file.stat().st_size for file in self._newest().tensors.iterdir())
        return (stall if background else whole), steps, whole

    def load(self) -> float:
        """Seconds of checking every digest and of loading."""
        started = time.perf_counter()
        checkpoint = store_of(self.config).open(self._newest().path)
        self.policy.restore(checkpoint, checkpoint.state(), generators=True)
        return time.perf_counter() - started

    def copy(self, to: Path) -> float:
        """Seconds of a plain copy of the same files, until it is on the disk."""
        started = time.perf_counter()
        for file in self._newest().tensors.iterdir():
            with file.open("rb") as content, (to / file.name).open("wb") as out:
                shutil.copyfileobj(content, out, 1 << 22)
                out.flush()
                os.fsync(out.fileno())
        return time.perf_counter() - started

    def read(self) -> float:
        """Seconds of reading the same files."""
        started = time.perf_counter()
        for file in self._newest().tensors.iterdir():
            with file.open("rb", buffering=0) as content:
                while content.read(1 << 22):
                    pass
        return time.perf_counter() - started

    def _newest(self) -> Checkpoint:
        return Checkpoint(store_of(self.config).paths()[-1])


def measure(backend: str, ranks: int, rounds: int, scratch: Path) -> list[CheckRow]:
    """Rows of one backend."""
    tree = {
        "pipeline": "sft",
        "max_steps": 1000,
        "run_dir": str(scratch / f"{backend}-{ranks}"),
        "model": {"path": MODEL},
        "data": {"train": {"task": "sort"}},
        "backend": {"name": backend},
        "runtime": {"ranks": ranks, "device": "cpu"},
        "checkpoint": {"every": 1, "keep": 1},
    }
    config = configs.parse(tree)
    folder = locate(config.model.path)
    spec = WorkerSpec(config, folder, plan(config, reference=False))
    store_of(config).folder.mkdir(parents=True)
    copies = scratch / f"copies-{backend}-{ranks}"
    copies.mkdir()
    with launch(partial(Worker, spec=spec), ranks, "cpu") as group:
        bench = Bench(config, fingerprint(folder), Policy(group, config, total_steps=1000))
        bench.train()
        alone = [bench.train() for _ in range(3)]
        first, _, _ = bench.save(background=True)
        bench.train()
        first_sync, _, _ = bench.save(background=False)
        stalls, waits, beside, copied, loads, reads = [], [], [], [], [], []
        for _ in range(rounds):
            bench.train()
            stall, steps, _ = bench.save(background=True)
            stalls.append(stall)
            beside += steps
            bench.train()
            waits.append(bench.save(background=False)[2])
            copied.append(bench.copy(copies))
            reads.append(bench.read())
            loads.append(bench.load())
            alone.append(bench.train())
    about: dict[str, Any] = {"backend": backend, "ranks": ranks, "options": {"model": MODEL.removeprefix("builtin:"), "rounds": rounds}}
    where: Callable[..., CheckRow] = partial(measured, **about)
    middle, wait = statistics.median(stalls), statistics.median(waits)
    return [
        at_most("stall of an async save, share of a synchronous one", middle / wait, STALL, **about),
        where("the same of the first save", first / first_sync),
        where("stall of an async save, s", middle),
        where("stall of the first async save, s", first),
        where("stall of a synchronous save, s", wait),
        where("optimizer step, s", statistics.median(alone)),
        where("optimizer step while a save is written, s", statistics.median(beside) if beside else float("nan")),
        where("MB of a checkpoint's tensors", bench.bytes / _MB),
        *rates(bench.bytes, {"save": waits, "plain copy": copied, "load": loads, "plain read": reads}, where),
    ]


def rates(size: int, seconds: dict[str, Sequence[float]], row: Callable[..., CheckRow]) -> list[CheckRow]:
    """MB a second of each, by the median."""
    return [row(f"{name}, MB/s", size / _MB / statistics.median(values)) for name, values in seconds.items()]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    common.announce()
    with tempfile.TemporaryDirectory(prefix="drumroll-save-") as name:
        rows = [row for backend, ranks in SUBJECTS for row in measure(backend, ranks, arguments.rounds, Path(name))]
    common.report(rows, "saves and loads", arguments.json)


if __name__ == "__main__":
    main()
