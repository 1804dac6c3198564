"""Which curves a run is drawn as: charts are data here, and `svg.py` and `picture.py` draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from drumroll.observe.metrics import StepRecord
from drumroll.observe.run import Run

Mark = Literal["line", "dots", "area"]  # dots: measured now and then; area: stacked on the series before it
MOST_POINTS = 400  # a longer series is drawn as means over as many bins
SMOOTH = 0.7  # weight of what was before, in the bold line over noisy values


@dataclass(slots=True, frozen=True)
class Series:
    name: str
    xs: list[float]
    ys: list[float]  # as long as xs; NaN leaves a hole
    color: str
    mark: Mark = "line"
    smooth: bool = False  # draw the values faintly and an exponential mean boldly


@dataclass(slots=True, frozen=True)
class Chart:
    title: str
    hint: str  # what a newcomer should look for, one sentence
    series: list[Series]
    x_label: str = "step"
    from_zero: bool = True
    to: float | None = None  # greatest y to show at least


BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, GREY = "#2563eb", "#ea580c", "#16a34a", "#dc2626", "#9333ea", "#0d9488", "#64748b"
Value = Callable[[StepRecord], float | None]


def main_chart(run: Run) -> Chart:
    """Reward and evaluation score of an RL run; the loss of an SFT run."""
    if not run.rl and run.sft:
        return _loss_chart(run.sft, "Loss")
    series = _series(run.rl, [("reward (training samples)", lambda r: r.reward_mean, BLUE)], smooth=True)
    if run.evals:
        xs, ys = [float(e.step) for e in run.evals], [e.score for e in run.evals]
        series.append(Series("evaluation score (held-out prompts)", xs, ys, ORANGE, mark="dots"))
    return Chart(
        "Reward",
        "Should rise. The line is the mean reward of the samples trained on; the dots are evaluations on prompts never trained on.",
        series,
        to=1.0 if _within_one(series) else None,
    )


def detail_charts(run: Run) -> list[Chart]:
    """The other curves, those without a value left out."""
    rl, timed = run.rl, run.rl or run.sft
    charts = [
        Chart(
            "Entropy",
            "How undecided the policy is, in nats a token. A slow fall is normal; a fall to zero while the reward stands still is not.",
            _series(rl, [("entropy", lambda r: r.entropy, PURPLE)], smooth=True),
        ),
        Chart(
            "Response length",
            "Tokens a response. Growing without more reward, or growing into the limit, is a warning.",
            _series(
                rl,
                [("mean", lambda r: r.response_tokens_mean, TEAL), ("longest", lambda r: _float(r.response_tokens_max), GREY)],
            ),
        ),
        Chart(
            "Shares",
            "Groups with equal rewards teach nothing; cut responses are judged without their end. "
            "Both should be low until the task is solved.",
            _series(
                rl,
                [
                    ("groups with equal rewards", lambda r: r.no_variance_share, ORANGE),
                    ("responses cut at the limit", lambda r: r.truncated_share, RED),
                ],
            ),
            to=1.0,
        ),
        Chart(
            "Sampler against trainer",
            "Mean difference of the log-probs that both give the same tokens, in nats. About 1e-6 in fp32, 1e-2 in bf16; "
            "a rise means stale weights or another distribution.",
            _series(rl, [("mean gap", lambda r: r.logprob_gap_mean, BLUE)]),
        ),
        Chart(
            "KL",
            "How far the policy went, in nats a token: from the frozen reference, and within a step from the policy that sampled.",
            _series(rl, [("to the reference", lambda r: r.kl, PURPLE), ("to the sampling policy", lambda r: r.kl_old or None, GREY)]),
        ),
        Chart(
            "Critic",
            "How much of the returns the critic foresaw: explained variance, 1 at best. At or below 0 advantages are no better for it.",
            _series(rl, [("explained variance", lambda r: r.explained_variance, TEAL)], smooth=True),
        ),
        Chart(
            "Gradient norm",
            "Before clipping. Spikes are steps worth a look; a hole is a step that was skipped.",
            _series(rl or run.sft, [("gradient norm", lambda r: r.grad_norm, GREEN)], smooth=True),
        ),
        Chart("Where the time goes", "Seconds of a step by phase, stacked.", _time_series(timed)),
    ]
    if run.rl and run.sft:
        charts.append(_loss_chart(run.sft, "Warm-up loss"))
    return [chart for chart in charts if chart.series]


def _loss_chart(records: Sequence[StepRecord], title: str) -> Chart:
    series = _series(records, [("loss", lambda r: r.loss, BLUE)])
    return Chart(title, "Cross-entropy of the supervised phase, in nats a token. Should fall.", series)


def _time_series(records: Sequence[StepRecord]) -> list[Series]:
    phases: list[tuple[str, Value, str]] = [
        ("generate", lambda r: r.seconds_generate, BLUE),
        ("reward", lambda r: r.seconds_reward, PURPLE),
        ("log-probs", lambda r: r.seconds_logprobs, TEAL),
        ("train", lambda r: r.seconds_train, GREEN),
        ("weight sync", lambda r: r.seconds_sync, ORANGE),
        ("other", _other_seconds, GREY),
    ]
    series = _series(records, phases, mark="area")
    return [one for one in series if max(one.ys, default=0.0) > 0.0]


def _other_seconds(r: StepRecord) -> float:
    phases = r.seconds_generate + r.seconds_reward + r.seconds_logprobs + r.seconds_train + r.seconds_sync
    return max(r.seconds_total - phases, 0.0)


def _series(
    records: Sequence[StepRecord], values: list[tuple[str, Value, str]], *, smooth: bool = False, mark: Mark = "line"
) -> list[Series]:
    """A series a value, without those that no record has."""
    found = []
    for name, value, color in values:
        points = [(float(record.step), _float(value(record))) for record in records]
        if any(math.isfinite(y) for _, y in points):
            xs, ys = _thin([x for x, _ in points], [y for _, y in points])
            found.append(Series(name, xs, ys, color, mark, smooth))
    return found


def _float(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else float(value)


def _thin(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    if len(xs) <= MOST_POINTS:
        return xs, ys
    bins = list(pairwise(i * len(xs) // MOST_POINTS for i in range(MOST_POINTS + 1)))
    return [_mean(xs[a:b]) for a, b in bins], [_mean(ys[a:b]) for a, b in bins]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _within_one(series: Sequence[Series]) -> bool:
    return all(0.0 <= y <= 1.0 for one in series for y in one.ys if math.isfinite(y))


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean, each value weighed by how long ago it was, unbiased at the start; a NaN stays one and counts for nothing."""
    total, weight, result = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total, weight = SMOOTH * total + value, SMOOTH * weight + 1.0
            result.append(total / weight)
        else:
            result.append(math.nan)
    return result
