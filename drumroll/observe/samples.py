"""Sampled responses before and after training, side by side: which ones the report shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from drumroll.observe.metrics import RolloutRecord
from drumroll.types import Stream

Change = Literal["better", "same", "worse"]
SHOWN = {"better": 4, "same": 2, "worse": 2}  # of each kind, the first ones in the order of the file


@dataclass(slots=True, frozen=True)
class Pair:
    """One prompt, answered by the first and by the last weights that were recorded."""

    before: RolloutRecord
    after: RolloutRecord

    @property
    def change(self) -> Change:
        gain = (self.after.reward or 0.0) - (self.before.reward or 0.0)
        return "better" if gain > 0 else ("worse" if gain < 0 else "same")


@dataclass(slots=True, frozen=True)
class Comparison:
    """Pairs of one prompt before and after (`phase` eval), or of the samples of two training steps, whose prompts differ."""

    phase: Stream
    first_step: int
    last_step: int
    counts: dict[Change, int]  # of all pairs
    shown: list[Pair]


def compare(rollouts: Iterable[RolloutRecord]) -> Comparison | None:
    """One pass over the rollouts, holding those of two steps: the first and the last evaluation, else the first and the last training step.

    None when there is nothing to compare. A step that a resumed run did again counts as last recorded.
    """
    ends: dict[Stream, _Ends] = {"eval": _Ends(), "train": _Ends()}
    for rollout in rollouts:
        if rollout.index == 0:  # one sample a prompt is enough to read
            ends[rollout.phase].add(rollout)
    phase: Stream = "eval" if ends["eval"].first else "train"
    first, last = ends[phase].first, ends[phase].last or ends[phase].first
    if not first:
        return None
    if phase == "eval":
        pairs = [Pair(first[key], last[key]) for key in first if key in last]
    else:
        pairs = [Pair(a, b) for a, b in zip(first.values(), last.values(), strict=False)]
    counts: dict[Change, int] = {kind: sum(pair.change == kind for pair in pairs) for kind in ("better", "same", "worse")}
    return Comparison(phase, ends[phase].first_step, ends[phase].last_step, counts, _choose(pairs))


class _Ends:
    """Rollouts of the least and of the greatest step seen, by prompt."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, int | None], RolloutRecord] = {}
        self.last: dict[tuple[str, int | None], RolloutRecord] = {}
        self.first_step = self.last_step = 0

    def add(self, rollout: RolloutRecord) -> None:
        # every evaluation draws the same prompts, under new group ids
        key = (rollout.prompt_id, rollout.group_id if rollout.phase == "train" else None)
        if not self.first or rollout.step == self.first_step:
            self.first_step = rollout.step
            self.last_step = max(self.last_step, rollout.step)
            self.first[key] = rollout
        elif rollout.step >= self.last_step:
            if rollout.step > self.last_step:
                self.last = {}
            self.last_step = rollout.step
            self.last[key] = rollout


def _choose(pairs: Sequence[Pair]) -> list[Pair]:
    """A few of each kind, so that what training did not change, or broke, is seen too."""
    return [pair for kind, count in SHOWN.items() for pair in [p for p in pairs if p.change == kind][:count]]
