"""Wall-clock seconds of the phases of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

Phase = Literal["generate", "reward", "logprobs", "train", "sync"]


@dataclass(slots=True, frozen=True, kw_only=True)
class PhaseSeconds:
    """Seconds of one step: `total` is its whole wall-clock time, so what the phases leave over is the driver's own work."""

    generate: float = 0.0
    reward: float = 0.0
    logprobs: float = 0.0
    train: float = 0.0
    sync: float = 0.0
    total: float = 0.0


class PhaseTimer:
    """`with timer.phase("train"): ...` adds up; `take()` gives a step's seconds and starts the next one."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {}
        self._start = perf_counter()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time inside the `with` block to a phase, also when it raises."""
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start

    def take(self) -> PhaseSeconds:
        """Seconds since the last `take` or `restart`, which start from zero again."""
        now = perf_counter()
        taken = PhaseSeconds(**self._seconds, total=now - self._start)
        self.restart()
        return taken

    def restart(self) -> None:
        """Forget what was measured, e.g. after an evaluation between two steps."""
        self._seconds = {}
        self._start = perf_counter()
