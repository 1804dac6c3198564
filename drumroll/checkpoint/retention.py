"""Which checkpoints stay: the last few, every so many steps, and the best by a metric. Pure; steps are numbers and ordered as such."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from drumroll.config import CheckpointConfig, RunConfig
from drumroll.errors import UserError
from drumroll.observe.metrics import EvalRecord, StepRecord

_NUMBERS = ("int", "float", "dict")  # annotations of the fields that are metrics


def kept(steps: Mapping[int, Mapping[str, float]], config: CheckpointConfig) -> set[int]:
    """The steps that stay. `steps`: step of each valid checkpoint -> its metrics; of several best ones the latest counts, NaN never."""
    ordered = sorted(steps)
    staying = set(ordered[-config.keep :])
    if config.keep_every:
        staying |= {step for step in ordered if step % config.keep_every == 0}
    if config.keep_best is not None:
        sign = 1 if config.keep_best_is == "max" else -1
        scores = [(sign * steps[step].get(config.keep_best, math.nan), step) for step in ordered]
        scores = [(score, step) for score, step in scores if not math.isnan(score)]  # NaN compares as neither more nor less
        staying |= {max(scores)[1]} if scores else set()
    return staying


def most_held(config: RunConfig) -> int:
    """Most checkpoints on the disk at once in a whole run; the one being written is there beside those it will replace."""
    every, keep = config.checkpoint.every, config.checkpoint
    written = -(-config.max_steps // every)
    multiples = sum(step % keep.keep_every == 0 for step in range(every, config.max_steps + 1, every)) if keep.keep_every else 0
    return min(written, keep.keep + multiples + (keep.keep_best is not None) + 1)


def check_metric(config: RunConfig) -> None:
    """Raises UserError when no record has the metric of `checkpoint.keep_best`."""
    wanted = config.checkpoint.keep_best
    if wanted is None:
        return
    prefixes: dict[str, type[StepRecord] | type[EvalRecord]] = {config.pipeline: StepRecord}
    if config.data.eval is not None:
        prefixes["eval"] = EvalRecord
    known = [f"{prefix}/{f.name}" for prefix, record in prefixes.items() for f in fields(record) if str(f.type).startswith(_NUMBERS)]
    if "/".join(wanted.split("/")[:2]) not in known:
        near = get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"checkpoint.keep_best: this run records no metric {wanted!r}; names are those of TensorBoard, e.g. "
            f"{config.pipeline}/loss{' or eval/score' if 'eval' in prefixes else ''}{hint}"
        )
