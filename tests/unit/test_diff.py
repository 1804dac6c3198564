"""`drumroll diff` on records made by hand: what it names, and what it cannot compare."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drumroll.cli import app
from drumroll.errors import UserError
from drumroll.observe.jsonl import JsonlWriter
from drumroll.observe.metrics import DigestRecord, StepRecord
from drumroll.observe.run import DIGESTS_FILE, METRICS_FILE
from drumroll.pipelines.diff import compare
from tests.records import healthy_record

WEIGHTS = {"embed": "00", "head": "01"}


def write(run: Path, steps: list[StepRecord], digests: dict[int, dict[str, str]]) -> Path:
    with JsonlWriter(run / METRICS_FILE) as metrics:
        metrics.write_all(steps)
    if digests:
        with JsonlWriter(run / DIGESTS_FILE) as weights:
            weights.write_all(DigestRecord(step=step, digests=of_step) for step, of_step in digests.items())
    return run


def steps(count: int = 4) -> list[StepRecord]:
    return [healthy_record(step) for step in range(1, count + 1)]


def test_equal_runs_are_equal_also_in_a_nan_and_where_one_is_longer(tmp_path: Path) -> None:
    lost = [*steps(3), replace(healthy_record(4), grad_norm=math.nan)]
    found = compare(
        write(tmp_path / "a", lost, {0: WEIGHTS, 2: WEIGHTS, 4: WEIGHTS}),
        write(tmp_path / "b", [*lost, healthy_record(5)], {0: WEIGHTS, 4: WEIGHTS, 5: WEIGHTS}),
    )
    assert found.equal
    assert (found.steps, list(found.digested), found.further) == (4, [0, 4], (0, 1))
    shown = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0
    assert "has 1 step more: not compared" in " ".join(shown.output.split())


def test_the_first_step_and_what_differs_in_it_are_named(tmp_path: Path) -> None:
    other = steps()
    other[2] = replace(other[2], loss=other[2].loss + 1e-9, tokens_digest="ff")
    other[3] = replace(other[3], grad_norm=9.0)
    first = write(tmp_path / "a", steps(), {0: WEIGHTS, 2: WEIGHTS, 4: WEIGHTS})
    second = write(tmp_path / "b", other, {0: WEIGHTS, 2: WEIGHTS, 4: WEIGHTS | {"head": "02", "new": "03"}})
    found = compare(first, second)
    assert found.metrics is not None
    assert (found.metrics.step, found.metrics.after) == ("rl step 3", "rl step 2")
    assert [line.split(":")[0] for line in found.metrics.what] == ["tokens_digest", "loss"]
    assert found.weights is not None
    assert (found.weights.step, found.weights.after) == ("step 4", "step 2")
    assert list(found.weights.what) == ["2 of 3 tensors:", "head", "new (only in one of them)"]
    shown = CliRunner().invoke(app, ["diff", str(first), str(second)])
    assert shown.exit_code == 1
    assert "weights: they differ at step 4, equal up to step 2" in shown.output


def test_a_run_that_was_done_again_from_a_checkpoint_counts_as_it_ended(tmp_path: Path) -> None:
    """A resumed run may have left a later step's record before that of the step that it went back to."""
    again = [*steps(3), healthy_record(2), *steps()[2:]]
    first = write(tmp_path / "a", again, {0: WEIGHTS, 3: {"embed": "ee", "head": "ee"}, 2: WEIGHTS, 4: WEIGHTS})
    found = compare(first, write(tmp_path / "b", steps(), {0: WEIGHTS, 2: WEIGHTS, 4: WEIGHTS}))
    assert found.equal
    assert list(found.digested) == [0, 2, 4]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", steps(), {0: WEIGHTS})
    for other, words in (
        (tmp_path / "nothing", f"no records: expected the directory of a run, with {METRICS_FILE}"),
        (write(tmp_path / "bare", steps(), {}), "its weights were not recorded; train it with record.digests=1"),
        (write(tmp_path / "later", [healthy_record(9)], {0: WEIGHTS}), "no steps in common: steps 1 to 4 and step 9"),
        (write(tmp_path / "odd", steps(), {3: WEIGHTS}), "no steps with digests in common: step 0 and step 3"),
    ):
        with pytest.raises(UserError, match=words):
            compare(whole, other)
