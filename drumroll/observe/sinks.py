"""Places that step records go to besides the record files. A sink may fail; the run goes on without it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from drumroll.observe.alarms import Alarm
from drumroll.observe.metrics import EvalRecord, StepRecord


class Sink(Protocol):
    """Any exception from a verb drops the sink for the rest of the run."""

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def note(self, text: str) -> None:
        """Something a reader of the log wants to know: a checkpoint was written, a sink was dropped."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files with one scalar a numeric field: `rl/reward_mean`, `rl/rewards/exact`, `eval/score`, ..."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]  # slow to import

        self._writer = EventFileWriter(str(directory))

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None:
        self._write(record.phase, record, record.step, record.time)

    def evaluation(self, record: EvalRecord) -> None:
        self._write("eval", record, record.step, record.time)

    def note(self, text: str) -> None:
        """Scalars only."""

    def close(self) -> None:
        self._writer.close()

    def _write(self, prefix: str, record: StepRecord | EvalRecord, step: int, time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=f"{prefix}/{tag}", simple_value=value) for tag, value in scalars(record)]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))
        self._writer.flush()


def scalars(record: StepRecord | EvalRecord) -> Iterator[tuple[str, float]]:
    """(name, finite number) of every numeric field but step and time, `name/key` for the entries of a mapping."""
    for name, value in asdict(record).items():
        if name in ("step", "time"):
            continue
        entries = {f"{name}/{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
        for tag, entry in entries.items():
            if isinstance(entry, (int, float)) and not isinstance(entry, bool) and math.isfinite(entry):
                yield tag, float(entry)
