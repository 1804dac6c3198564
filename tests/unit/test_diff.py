"""`drumroll diff` on records made by hand: what it names, and what it cannot compare."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from drumroll.cli import app
from drumroll.errors import UserError
from drumroll.observe.jsonl import JsonlWriter
from drumroll.observe.metrics import DigestRecord, StepRecord
from drumroll.observe.run import DIGESTS_FILE, METRICS_FILE
from drumroll.pipelines.diff import compare, diff, relative
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
    assert found.metrics.what == ["tokens_digest", "loss"]
    assert [(apart.name, apart.step) for apart in found.numbers] == [
        ("tokens_digest", "rl step 3"), ("loss", "rl step 3"), ("grad_norm", "rl step 4")
    ]  # fmt: skip
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
        (write(tmp_path / "later", [healthy_record(9)], {0: WEIGHTS}), "no steps in common: steps 1 to 4 and step 9"),
    ):
        with pytest.raises(UserError, match=words):
            compare(whole, other)


@pytest.mark.parametrize("far", [True, False])
def test_without_digests_the_numbers_are_compared_and_it_is_said(tmp_path: Path, far: bool) -> None:
    """Step, number, both values, relative difference, and the largest one of the run; whole at 80 columns."""
    other = steps()
    if far:
        other[1] = replace(other[1], entropy=(other[1].entropy or 0.0) * 1.25)
        other[3] = replace(other[3], entropy=(other[3].entropy or 0.0) * 2, kl=None)
    first, second = write(tmp_path / "a", steps(), {0: WEIGHTS}), write(tmp_path / "b", other, {})
    out = io.StringIO()
    assert diff(first, second, Console(file=out, width=80)) is not far
    said, lines = out.getvalue(), out.getvalue().splitlines()
    assert f"weights: not compared: digests are off in {second} (no {DIGESTS_FILE}); train it with record.digests=1" in said
    assert ("numbers: equal" in said) is not far
    if far:
        (entropy,) = [line.split() for line in lines if line.strip().startswith("entropy")]
        was = steps()[1].entropy
        assert was is not None
        assert entropy == ["entropy", "rl", "step", "2", f"{was:.7g}", f"{was * 1.25:.7g}", "2.0e-01", "5.0e-01", "rl", "step", "4"]
        assert max(len(line) for line in lines if not line.startswith(("weights", str(tmp_path)))) <= 80
    shown = CliRunner().invoke(app, ["diff", str(first), str(second)])
    assert shown.exit_code == int(far)


def test_digests_of_other_steps_compare_no_weights(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "a", steps(), {0: WEIGHTS}), write(tmp_path / "b", steps(), {3: WEIGHTS}))
    assert (found.equal, found.unweighed) == (True, "no steps with digests in common: step 0 and step 3")


def test_a_relative_difference_is_over_the_larger() -> None:
    assert [relative(*pair) for pair in ((1.0, 2.0), (-1.0, 1.0), (0, 0), (3, 3.0))] == [0.5, 2.0, 0.0, 0.0]
    assert math.isnan(relative("a", "b"))
    assert math.isnan(relative(None, 1.0))
