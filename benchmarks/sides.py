"""Two or more programs that take turns: each in a process of its own, one step at a time, so that a noisy machine slows all alike.

A side is a child process. Its parent writes one line with what to run, then one line a step; the child answers each with a Measure.
This file imports nothing but the standard library, because a side may run in an environment that has no drumroll.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(slots=True, frozen=True, kw_only=True)
class Measure:
    """One step of one side."""

    seconds: float
    cpu_seconds: float  # of the process, all threads: what is left of `seconds` when others hold the cores
    tokens: int  # of responses that were trained on; no padding
    peak_bytes: int = 0  # most resident memory of the process so far
    phases: dict[str, float] = field(default_factory=dict)  # seconds by name, where the side knows them
    lengths: list[int] = field(default_factory=list)  # of the responses, where the next sides of the round have to keep to them


@dataclass(slots=True, frozen=True)
class Summary:
    """Medians over the steps that count."""

    seconds: float
    cpu_seconds: float
    tokens: float
    tokens_per_second: float
    peak_bytes: int
    idle_bytes: int  # resident before the first model: interpreter and libraries
    phases: dict[str, float]

    @staticmethod
    def of(measures: Sequence[Measure], idle_bytes: int = 0) -> Summary:
        names = measures[0].phases
        return Summary(
            seconds=statistics.median(m.seconds for m in measures),
            cpu_seconds=statistics.median(m.cpu_seconds for m in measures),
            tokens=statistics.median(m.tokens for m in measures),
            tokens_per_second=statistics.median(m.tokens / m.seconds for m in measures),
            peak_bytes=max(m.peak_bytes for m in measures),
            idle_bytes=idle_bytes,
            phases={name: statistics.median(m.phases[name] for m in measures) for name in names},
        )


class Side:
    """The parent's handle of a child process; what the child prints goes to a log that is shown when it fails."""

    def __init__(self, name: str, command: Sequence[str], spec: Mapping[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", prefix=f"bench-{name}-")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **_ONE_THREAD}
        )
        self._send(json.dumps(spec))
        self.idle_bytes: int = self._receive()["idle_bytes"]

    def step(self, lengths: Sequence[int]) -> Measure:
        """One step; `lengths`: what a side before it in the round prescribes."""
        self._send(json.dumps(list(lengths)))
        return Measure(**self._receive())

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self) -> None:
        code = self._process.wait()
        self._log.seek(0)
        sys.exit(f"side {self.name!r} ended with exit code {code}:\n{self._log.read()[-4000:]}")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the child reads an end of file and leaves
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def alternate(commands: Mapping[str, Sequence[str]], spec: Mapping[str, Any], rounds: int, warmup: int = 1) -> dict[str, Summary]:
    """Start every side with the same `spec`, let them step in turn, and stop them; the first `warmup` rounds do not count."""
    measures: dict[str, list[Measure]] = {name: [] for name in commands}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, command, spec)) for name, command in commands.items()]
        for turn in range(warmup + rounds):
            lengths: list[int] = []
            for side in sides:
                measure = side.step(lengths)
                lengths = measure.lengths or lengths
                if turn >= warmup:
                    measures[side.name].append(measure)
        return {side.name: Summary.of(measures[side.name], side.idle_bytes) for side in sides}


class Channel:
    """The child's end. Whatever the child's libraries print to standard output goes to its log instead."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.spec: dict[str, Any] = json.loads(sys.stdin.readline())

    def ready(self) -> None:
        """Libraries are loaded, and no model yet."""
        self._write({"idle_bytes": peak_bytes()})

    def wait(self) -> bool:
        """Whether another step is wanted; `lengths` then holds what another side prescribes for it."""
        line = sys.stdin.readline()
        self.lengths: list[int] = json.loads(line) if line else []
        return bool(line)

    def answer(self, measure: Measure) -> None:
        self._write(asdict(measure))

    def _write(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


class Stopwatch:
    """Wall-clock and processor seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def measure(self, tokens: int, phases: Mapping[str, float] | None = None, lengths: Sequence[int] = ()) -> Measure:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Measure(
            seconds=wall, cpu_seconds=cpu, tokens=tokens, peak_bytes=peak_bytes(), phases=dict(phases or {}), lengths=list(lengths)
        )


def peak_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def python(script: Path, *arguments: str, interpreter: str = sys.executable) -> list[str]:
    """Command that runs `script` as a side."""
    return [interpreter, str(script), *arguments]
