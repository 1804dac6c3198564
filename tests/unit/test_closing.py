"""The last lines of a run say what was learned, and nothing that the run does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drumroll.observe.closing import closing
from drumroll.observe.run import REPORT_FILE
from drumroll.observe.summary import Summary

WHOLE = Summary(
    status="completed", steps=60, eval_before=0.473, eval_after=0.851, weight_pushes=61, digests_matched=61, logprob_gap_mean=1.6e-7,
    logprob_gap_max=2e-5, skipped_steps=0, abstentions=0, train_tokens=1000, wall_seconds=273.6, peak_bytes_per_rank=[1, 2],
)  # fmt: skip


def test_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).touch()
    assert closing(WHOLE, tmp_path).split("\n") == [
        "completed: 60 steps in 4m34s",
        "evaluation: 0.473 before, 0.851 after (+0.378)",
        "weights: 61 of 61 pushes arrived as they were sent; engine-trainer log-prob gap 1.6e-07 on average",
        f"to look at: {tmp_path / REPORT_FILE}",
    ]


def test_an_sft_run_that_failed_early(tmp_path: Path) -> None:
    early = replace(WHOLE, status="failed", steps=0, eval_after=None, weight_pushes=0, wall_seconds=2, error="RunError: x")
    assert closing(early, tmp_path) == "failed: 0 steps in 2s: RunError: x"
