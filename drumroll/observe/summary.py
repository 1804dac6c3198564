"""`summary.json`: how a run ended, in one object; written once, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drumroll.errors import UserError
from drumroll.observe.foreseen import Foreseen
from drumroll.observe.jsonl import decode, dumps
from drumroll.observe.metrics import EvalRecord, StepRecord

Status = Literal["completed", "failed", "interrupted"]


@dataclass(slots=True, frozen=True, kw_only=True)
class Summary:
    """The keys of `summary.json`."""

    status: Status
    steps: int  # RL steps done (SFT steps in an SFT run)
    eval_before: float | None  # score of the evaluation before the first step
    eval_after: float | None  # score of the last evaluation after it
    weight_pushes: int  # pushes from trainer to engine, the first one included
    digests_matched: int  # pushes whose digests were equal on every rank
    logprob_gap_mean: float | None  # nats, mean over the steps
    logprob_gap_max: float | None  # nats, over all tokens
    skipped_steps: int  # optimizer steps skipped for a non-finite gradient norm
    abstentions: int  # training rollouts without a verdict
    train_tokens: int  # tokens that carried loss
    wall_seconds: float  # the whole run, start-up and evaluations included
    peak_bytes_per_rank: list[int]  # most bytes each rank held at once
    predicted_peak_bytes_per_rank: int | None = None  # what was foreseen of it, on the fullest rank; None: nothing could be
    process_bytes: int = 0  # of it what a process held before any model; 0 where the peak is a GPU's
    state_bytes_per_rank: list[int] = field(default_factory=list)  # parameters, gradients and optimizer state between steps, from storages
    predicted_state_bytes_per_rank: int | None = None  # what was foreseen of that
    error: str | None = None  # first line of what ended the run


def summarise(
    *,
    status: Status,
    records: Sequence[StepRecord],
    evals: Sequence[EvalRecord],
    weight_pushes: int,
    digests_matched: int,
    wall_seconds: float,
    peak_bytes_per_rank: Sequence[int],
    state_bytes_per_rank: Sequence[int] = (),
    foreseen: Foreseen | None = None,
    error: str | None = None,
) -> Summary:
    """Condense a run's records. Steps are those of the main phase: RL if there was any."""
    main = [record for record in records if record.phase == "rl"] or list(records)
    gaps = [record.logprob_gap_mean for record in main if record.logprob_gap_mean is not None]
    return Summary(
        status=status,
        steps=len(main),
        eval_before=next((e.score for e in evals if e.step == 0), None),
        eval_after=next((e.score for e in reversed(evals) if e.step > 0), None),
        weight_pushes=weight_pushes,
        digests_matched=digests_matched,
        logprob_gap_mean=sum(gaps) / len(gaps) if gaps else None,
        logprob_gap_max=max((record.logprob_gap_max for record in main if record.logprob_gap_max is not None), default=None),
        skipped_steps=sum(record.skipped_steps for record in main),
        abstentions=sum(record.abstentions for record in main),
        train_tokens=sum(record.train_tokens for record in main),
        wall_seconds=wall_seconds,
        peak_bytes_per_rank=list(peak_bytes_per_rank),
        predicted_peak_bytes_per_rank=foreseen.peak if foreseen is not None else None,
        process_bytes=foreseen.process if foreseen is not None else 0,
        state_bytes_per_rank=list(state_bytes_per_rank),
        predicted_state_bytes_per_rank=foreseen.state if foreseen is not None else None,
        error=error,
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write through a temporary file and a rename: a reader sees all of it or the one before."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(json.loads(dumps(summary)), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_summary(path: Path) -> Summary | None:
    """None when the run wrote none: it is still going, or it was killed. Raises UserError for a file that is no summary."""
    if not path.is_file():
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}: expected an object, got {type(row).__name__}")
    return decode(Summary, row, str(path))
