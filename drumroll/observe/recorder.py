"""Everything a run records, behind one object: the files of the run directory, and the sinks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from drumroll.observe.alarms import Alarm, alarms
from drumroll.observe.jsonl import JsonlWriter
from drumroll.observe.metrics import DigestRecord, EvalRecord, EventRecord, RolloutRecord, StepRecord
from drumroll.observe.run import DIGESTS_FILE, EVALS_FILE, EVENTS_FILE, METRICS_FILE, RECORD_FILES, ROLLOUTS_FILE, read_evals, read_steps
from drumroll.observe.sinks import Sink


class Recorder:
    """Appends to the record files and passes records on to the sinks.

    `metrics.jsonl` is the record itself: a failure to write it ends the run (RunError). A sink that raises is dropped, with an alarm.
    Opened on a directory that has records (a resumed run), it carries on after them; `cut_back` takes those away that will come again.
    """

    def __init__(self, run_dir: Path, sinks: Sequence[Sink] = (), *, rollouts: bool = True, digests: bool = False) -> None:
        self.run_dir = run_dir
        self.records = read_steps(run_dir)
        self.evals = read_evals(run_dir)
        self._metrics = JsonlWriter(run_dir / METRICS_FILE)
        self._evals = JsonlWriter(run_dir / EVALS_FILE)
        self._rollouts = JsonlWriter(run_dir / ROLLOUTS_FILE) if rollouts else None
        self._digests = JsonlWriter(run_dir / DIGESTS_FILE) if digests else None
        self._sinks = list(sinks)
        self._standing: dict[str, Alarm] = {}  # alarms that no record shows, by kind

    def step(self, record: StepRecord) -> None:
        """Record one step, with the alarms that are on after it."""
        self.records.append(record)
        current = [*alarms(self.records), *self._standing.values()]
        record = self.records[-1] = replace(record, alarms=[alarm.kind for alarm in current])
        self._metrics.write(record)
        self._each(lambda sink: sink.step(record, current))

    def evaluation(self, record: EvalRecord) -> None:
        self.evals.append(record)
        self._evals.write(record)
        self._each(lambda sink: sink.evaluation(record))

    def rollouts(self, records: Sequence[RolloutRecord]) -> None:
        """Record rollouts of training or evaluation (`metrics.rollout_records`), unless the run is told not to."""
        if self._rollouts is not None:
            self._rollouts.write_all(records)

    def digests(self, record: DigestRecord) -> None:
        """Record the weights' digests. The recorder was opened for it."""
        assert self._digests is not None, "opened without digests"
        self._digests.write(record)

    def note(self, text: str) -> None:
        """Tell the reader of the log something."""
        self._each(lambda sink: sink.note(text))

    def event(self, kind: str, text: str) -> None:
        """Something happened to the run: it is noted, and kept in `events.jsonl`, which is there only if something did."""
        main = [record for record in self.records if record.phase == "rl"] or self.records
        with JsonlWriter(self.run_dir / EVENTS_FILE) as writer:
            writer.write(EventRecord(step=main[-1].step if main else 0, kind=kind, text=text))
        self.note(text)

    def alarm(self, alarm: Alarm) -> None:
        """An event that is no number of a step; its alarm is on from here on, and takes the place of one of its kind."""
        self._standing[alarm.kind] = alarm
        self.event(alarm.kind, f"{alarm.what}. Likely: {alarm.cause}. Try: {alarm.action}.")

    def attach(self, name: str, make: Callable[[], Sink]) -> None:
        """Add a sink, and tell it what has been recorded so far. One that cannot even be made is as one that fails later."""
        try:
            sink = make()
            for record in self.records:
                sink.step(record, [])
            for one in self.evals:
                sink.evaluation(one)
        except Exception as error:  # noqa: BLE001 - fault boundary, as in `_each`
            self._lost(name, error)
        else:
            self._sinks.append(sink)

    def sizes(self) -> dict[str, int]:
        """Bytes of each record file: where a checkpoint of now stands in them."""
        files = {name: self.run_dir / name for name in RECORD_FILES}
        return {name: file.stat().st_size if file.is_file() else 0 for name, file in files.items()}

    def cut_back(self, sizes: Mapping[str, int]) -> None:
        """Take away what was written after `sizes`. A file that is shorter has lost records: that is said, and the rest kept."""
        now = self.sizes()
        for name, size in sizes.items():
            if now.get(name, 0) > size:
                os.truncate(self.run_dir / name, size)
            elif now.get(name, 0) < size:
                self.note(f"{self.run_dir / name} has {now.get(name, 0)} bytes, at the checkpoint it had {size}: records were lost")
        self.records, self.evals = read_steps(self.run_dir), read_evals(self.run_dir)

    def sync(self) -> None:
        """Put everything on the disk, e.g. before a checkpoint counts as written."""
        for writer in self._writers():
            writer.sync()

    def close(self) -> None:
        for writer in self._writers():
            writer.close()
        self._each(lambda sink: sink.close())
        self._sinks = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _writers(self) -> list[JsonlWriter]:
        return [writer for writer in (self._metrics, self._evals, self._rollouts, self._digests) if writer is not None]

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001 - fault boundary: a dead tracker is no reason to lose a run
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        self._lost(type(sink).__name__, error)

    def _lost(self, name: str, error: Exception) -> None:
        what = f"{name} failed and is off for the rest of the run ({type(error).__name__}: {error})"
        action = f"nothing for this run: {METRICS_FILE} has everything, and --resume writes TensorBoard's files again from it"
        if not self._sinks:
            print(what, file=sys.stderr)
        self.alarm(Alarm("tracker", what, "its server or its disk is gone", action))
