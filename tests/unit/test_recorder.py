"""The recorder: what lands in the run directory, dead sinks, resumed runs; and the summary at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from drumroll.errors import UserError
from drumroll.observe.alarms import Alarm
from drumroll.observe.metrics import EvalRecord, StepRecord, eval_record, rollout_records
from drumroll.observe.recorder import Recorder
from drumroll.observe.run import read_events, read_rollouts, read_run, read_steps
from drumroll.observe.sinks import TensorBoardSink, scalars
from drumroll.observe.summary import read_summary, summarise, write_summary
from tests.records import finished, group, healthy_history, healthy_record, sft_record


class ListSink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.alarms: list[list[str]] = []
        self.notes: list[str] = []
        self.closed = False

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None:
        self.steps.append(record.step)
        self.alarms.append([alarm.kind for alarm in alarms])

    def evaluation(self, record: EvalRecord) -> None:
        self.notes.append(f"eval {record.score}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


class DeadSink(ListSink):
    """A tracker whose server went away after the first step."""

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None:
        super().step(record, alarms)
        if len(self.steps) > 1:
            raise ConnectionError("tracker is gone")


def test_a_dead_sink_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    dead, alive = DeadSink(), ListSink()
    with Recorder(tmp_path, [dead, alive]) as recorder:
        for record in healthy_history(5):
            recorder.step(record)
    assert dead.steps == [1, 2] and alive.steps == [1, 2, 3, 4, 5]
    assert len(alive.notes) == 1 and "DeadSink failed" in alive.notes[0] and "ConnectionError: tracker is gone" in alive.notes[0]
    assert alive.closed
    assert [record.step for record in read_steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert [record.alarms for record in read_steps(tmp_path)] == [[], [], ["tracker"], ["tracker"], ["tracker"]]
    [event] = read_events(tmp_path)
    assert (event.step, event.kind) == (2, "tracker") and "ConnectionError: tracker is gone" in event.text


def test_a_sink_that_cannot_be_made_is_a_dead_one(tmp_path: Path) -> None:
    """TensorBoard's directory is a file: what a full or a foreign disk looks like."""
    (tmp_path / "tensorboard").touch()
    with Recorder(tmp_path) as recorder:
        recorder.attach("TensorBoard", lambda: TensorBoardSink(tmp_path / "tensorboard"))
        recorder.step(healthy_record(1))
    assert [record.alarms for record in read_steps(tmp_path)] == [["tracker"]]
    assert "TensorBoard failed" in read_events(tmp_path)[0].text


def test_the_last_sink_to_die_is_reported_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path, [DeadSink()]) as recorder:
        for record in healthy_history(4):
            recorder.step(record)
    assert capsys.readouterr().err.count("DeadSink failed") == 1


def test_a_record_file_that_cannot_be_written_does_end_the_run(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder, pytest.raises(TypeError):
        recorder.step(replace(healthy_record(1), rewards={"exact": object()}))  # type: ignore[dict-item]


def test_alarms_are_recorded_with_the_step_and_shown(tmp_path: Path) -> None:
    sink = ListSink()
    with Recorder(tmp_path, [sink]) as recorder:
        recorder.step(healthy_record(1))
        recorder.step(replace(healthy_record(2), skipped_steps=1))
    assert sink.alarms == [[], ["skipped_steps"]]
    assert [record.alarms for record in read_steps(tmp_path)] == [[], ["skipped_steps"]]


def test_a_run_directory_reads_back_equal(tmp_path: Path) -> None:
    steps = [sft_record(1), sft_record(2), *healthy_history(3)]
    evals = [eval_record(step=s, version=s, groups=[group([1.0]), group([0.0], group_id=1)], seconds=1.0) for s in (0, 3)]
    rows = rollout_records([group([1.0, None])], phase="train", step=1)
    with Recorder(tmp_path) as recorder:
        for step in steps:
            recorder.step(step)
        for one in evals:
            recorder.evaluation(one)
        recorder.rollouts(rows)
    run = read_run(tmp_path)
    assert run.steps == steps and run.sft == steps[:2] and run.evals == evals and run.summary is None and run.config == ""
    assert list(read_rollouts(tmp_path)) == rows
    assert [e.score for e in run.evals] == [0.5, 0.5]


def test_rollouts_can_be_left_out(tmp_path: Path) -> None:
    with Recorder(tmp_path, rollouts=False) as recorder:
        recorder.rollouts(rollout_records([group([1.0])], phase="train", step=1))
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_resumed_run_cuts_back_what_it_does_again(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for record in [sft_record(1), *healthy_history(10)]:
            recorder.step(record)
        recorder.evaluation(eval_record(step=10, version=10, groups=[group([1.0])], seconds=1.0))
        sizes = recorder.sizes()
        for step in range(11, 16):
            recorder.step(healthy_record(step))
        recorder.evaluation(eval_record(step=15, version=15, groups=[group([1.0])], seconds=1.0))
        recorder.rollouts(rollout_records([group([1.0])], phase="train", step=15))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"phase": "rl", "step": 16, "lo')  # killed while writing
    sink = ListSink()
    with Recorder(tmp_path) as recorder:
        recorder.cut_back(sizes)
        assert [record.step for record in recorder.records] == [1, *range(1, 11)]
        assert (tmp_path / "metrics.jsonl").read_bytes() == before[: sizes["metrics.jsonl"]]
        recorder.attach("list", lambda: sink)
        for step in (11, 12):
            recorder.step(replace(healthy_record(step), reward_mean=-1.0))
    assert sink.steps == [1, *range(1, 13)] and sink.notes == ["eval 1.0"]
    assert [(r.step, r.reward_mean == -1.0) for r in read_run(tmp_path).rl] == [(s, s > 10) for s in range(1, 13)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 13, "every step stands once in the file itself"
    assert [e.step for e in read_run(tmp_path).evals] == [10] and list(read_rollouts(tmp_path)) == []


def test_records_that_were_lost_since_the_checkpoint_are_said(tmp_path: Path) -> None:
    sink = ListSink()
    with Recorder(tmp_path, [sink]) as recorder:
        recorder.step(healthy_record(1))
        recorder.cut_back({**recorder.sizes(), "evals.jsonl": 77})
    assert len(sink.notes) == 1 and "evals.jsonl has 0 bytes, at the checkpoint it had 77: records were lost" in sink.notes[0]


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no records: expected the directory of a run, with metrics\.jsonl"):
        read_run(tmp_path)


def test_a_record_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"phase": "rl", "step": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: not a StepRecord: .*'version'"):
        read_run(tmp_path)


def test_tensorboard_reads_back_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for record in healthy_history(3):
        sink.step(replace(record, grad_norm=math.nan if record.step == 2 else 0.5), [])
    sink.evaluation(eval_record(step=3, version=3, groups=[group([1.0])], seconds=1.0))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("rl/grad_norm")] == [(1, 0.5), (3, 0.5)]
    assert [e.step for e in events.Scalars("rl/rewards/exact")] == [1, 2, 3]
    assert [(e.step, e.value) for e in events.Scalars("eval/score")] == [(3, 1.0)]
    assert {tag for tag in events.Tags()["scalars"] if tag.startswith("rl/")} == {f"rl/{name}" for name, _ in scalars(healthy_record(1))}


def test_summary_of_known_records(tmp_path: Path) -> None:
    summary = finished()
    assert (summary.steps, summary.eval_before, summary.eval_after) == (2, 0.25, 0.75)
    assert summary.logprob_gap_mean == pytest.approx(1.5e-7, rel=1e-12) and summary.logprob_gap_max == 4e-6
    assert (summary.skipped_steps, summary.train_tokens) == (1, 2 * 3584)
    write_summary(tmp_path / "summary.json", summary)
    row = json.loads((tmp_path / "summary.json").read_text())
    promised = "status steps eval_before eval_after weight_pushes digests_matched logprob_gap_mean wall_seconds peak_bytes_per_rank"
    assert row.keys() >= set(promised.split())
    assert row["peak_bytes_per_rank"] == [10, 20]
    assert read_summary(tmp_path / "summary.json") == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"], "no partial file is left"


def test_summary_without_an_evaluation_after_training(tmp_path: Path) -> None:
    one = eval_record(step=0, version=0, groups=[group([1.0])], seconds=1.0)
    summary = summarise(
        status="failed",
        records=[],
        evals=[one],
        weight_pushes=1,
        digests_matched=1,
        wall_seconds=1.0,
        peak_bytes_per_rank=[1],
        error="rank 1: boom",
    )
    assert (summary.steps, summary.eval_before, summary.eval_after, summary.logprob_gap_mean) == (0, 1.0, None, None)
    assert read_summary(tmp_path / "none.json") is None
