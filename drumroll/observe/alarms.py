"""Signs of a run going wrong, each with its likely cause and what to do. Pure functions of the step records so far.

An alarm is about a run that does not get better: entropy that falls or groups that agree because the task is being solved are what
training is for, so those alarms look at the reward too. Means are taken over the last `WINDOW` steps and compared with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from drumroll.observe.metrics import StepRecord

WINDOW = 5  # steps

NO_VARIANCE_SHARE = 0.8  # of groups
TRUNCATED_SHARE = 0.3  # of responses
ENTROPY_RATIO = 0.2  # of the first steps' entropy
LENGTH_RATIO = 2.0  # times, or one over it
GAP_NATS = 0.05  # mean; what bf16 kernels of two kinds differ by is about a tenth of it
GAP_GROWTH = 10.0  # times the first steps' gap, once above GAP_FLOOR
GAP_FLOOR = 1e-3  # nats
ABSTENTION_SHARE = 0.05  # of rollouts
SOLVED = 0.9  # of the way from the least reward seen to the greatest
PAID_FOR = 0.5  # share of the reward missing in the first steps that makes falling entropy, or agreeing groups, a success
RISE = 0.02  # of that way: less than this in WINDOW steps is no improvement


@dataclass(slots=True, frozen=True)
class Alarm:
    kind: str
    what: str  # what was seen, with its number
    cause: str
    action: str


def alarms(history: Sequence[StepRecord]) -> list[Alarm]:
    """Alarms that are on after the last record of `history`, which may hold SFT steps first."""
    rl = [record for record in history if record.phase == "rl"]
    found = [check(rl) for check in CHECKS] if rl else []
    return [alarm for alarm in [*found, skipped_steps(history)] if alarm is not None]


def no_variance(history: Sequence[StepRecord]) -> Alarm | None:
    """Most groups have equal rewards, and not because the task is being solved."""
    share = _recent(history, [record.no_variance_share for record in history])
    if share is None or share < NO_VARIANCE_SHARE or _paid_for(history):
        return None
    return Alarm(
        "no_variance",
        f"{share:.0%} of the groups had equal rewards",
        "equal rewards make zero advantages: the prompts are too hard or too easy, or the reward is too coarse",
        "warm up with SFT, pick prompts that are sometimes solved, raise algorithm.group_size or the temperature, or give partial credit",
    )


def truncation(history: Sequence[StepRecord]) -> Alarm | None:
    """Many responses are cut at the limit."""
    share = _recent(history, [record.truncated_share for record in history])
    if share is None or share < TRUNCATED_SHARE:
        return None
    return Alarm(
        "truncation",
        f"{share:.0%} of the responses were cut by rollout.max_tokens",
        "answers are longer than the limit, or the model does not stop: a cut answer is judged without its end",
        "raise rollout.max_tokens, set rollout.stop, check the EOS ids, or choose algorithm.overlong: mask or shape",
    )


def entropy_collapse(history: Sequence[StepRecord]) -> Alarm | None:
    """Entropy fell without the reward to show for it, and the reward stands still."""
    values = [record.entropy for record in history]
    first, last = _first(values), _recent(history, values)
    if first is None or last is None or last >= ENTROPY_RATIO * first or _paid_for(history) or _rising(history):
        return None
    return Alarm(
        "entropy_collapse",
        f"entropy fell from {first:.3g} to {last:.3g} nats and the reward no longer rises",
        "the policy settled on one answer before it found a better one: the steps are too large, or nothing rewards trying",
        "lower optim.lr, raise algorithm.clip_high (DAPO) or algorithm.entropy_coef, or add a KL to the reference",
    )


def length_drift(history: Sequence[StepRecord]) -> Alarm | None:
    """Responses are much longer or shorter than at first, without more reward."""
    values = [record.response_tokens_mean for record in history]
    first, last = _first(values), _recent(history, values)
    if first is None or last is None or first <= 0 or 1 / LENGTH_RATIO < last / first < LENGTH_RATIO or _gained(history):
        return None
    return Alarm(
        "length_drift",
        f"responses went from {first:.0f} to {last:.0f} tokens on average while the reward did not rise",
        "length itself is rewarded or punished: by the loss aggregation, by a format reward, or by truncation",
        "try aggregate: constant (Dr.GRPO) or token_mean, look at the longest and the shortest rollouts, or shape with algorithm.overlong",
    )


def logprob_gap(history: Sequence[StepRecord]) -> Alarm | None:
    """The sampler's and the trainer's log-probs differ too much, or much more than at first; judged by the last step alone."""
    last = history[-1].logprob_gap_mean
    first = _first([record.logprob_gap_mean for record in history])
    grown = last is not None and first is not None and last > GAP_FLOOR and last > GAP_GROWTH * first
    if last is None or (last <= GAP_NATS and not grown):
        return None
    was = f", {first:.2g} in the first steps" if first is not None and grown else ""
    return Alarm(
        "logprob_gap",
        f"sampler and trainer differ by {last:.2g} nats a token on average{was}",
        "they do not compute the same distribution: stale weights, another dtype, another temperature or mask, "
        "a kernel that differs; or rollout.top_p, top_k or min_p, which the trainer does not apply",
        "compare weight versions and digests, run `drumroll replay` on this step, and set the same dtype on both sides",
    )


def abstentions(history: Sequence[StepRecord]) -> Alarm | None:
    """Too many rollouts have no verdict."""
    recent = history[-WINDOW:]
    total = sum(record.rollouts for record in recent)
    share = sum(record.abstentions for record in recent) / total if total else 0.0
    if share <= ABSTENTION_SHARE:
        return None
    return Alarm(
        "abstentions",
        f"{share:.0%} of the rollouts got no verdict",
        "the reward function raised, ran out of time or gave None: those samples are left out",
        "look for `reward: null` in rollouts.jsonl, raise the reward's timeout_s, or fix the function",
    )


def skipped_steps(history: Sequence[StepRecord]) -> Alarm | None:
    """An optimizer step was skipped lately."""
    skipped = sum(record.skipped_steps + record.critic_skipped_steps for record in history[-WINDOW:])
    if not skipped:
        return None
    return Alarm(
        "skipped_steps",
        f"{skipped} optimizer steps were skipped in the last {min(WINDOW, len(history))} steps",
        "the gradient norm was not finite: an overflow, or NaN in a reward or a log-prob",
        "lower optim.lr, train in a wider dtype, or look at the rollouts of that step",
    )


CHECKS: tuple[Callable[[Sequence[StepRecord]], Alarm | None], ...] = (
    no_variance,
    truncation,
    entropy_collapse,
    length_drift,
    logprob_gap,
    abstentions,
)


def _first(values: Sequence[float | None]) -> float | None:
    known = [value for value in values[:WINDOW] if value is not None]
    return fmean(known) if known else None


def _recent(history: Sequence[StepRecord], values: Sequence[float | None]) -> float | None:
    """Mean of the last window; None before there is a whole one."""
    known = [value for value in values[-WINDOW:] if value is not None]
    return fmean(known) if known and len(history) >= WINDOW else None


def _spread(history: Sequence[StepRecord]) -> tuple[float, float]:
    """Least reward of any rollout so far, and the way from there to the greatest."""
    low = min((record.reward_min for record in history if record.reward_min is not None), default=0.0)
    high = max((record.reward_max for record in history if record.reward_max is not None), default=0.0)
    return low, high - low


def _place(history: Sequence[StepRecord], reward: float | None) -> float:
    """Where a mean reward lies between the least (0) and the greatest (1) reward seen; 0 when all were equal."""
    low, spread = _spread(history)
    return (reward - low) / spread if reward is not None and spread > 0 else 0.0


def _progress(history: Sequence[StepRecord]) -> float:
    return _place(history, _recent(history, [record.reward_mean for record in history]))


def _paid_for(history: Sequence[StepRecord]) -> bool:
    """The task is nearly solved, or a good part of what was missing in the first steps has been gained since.

    Where one answer is right, entropy and disagreement within groups fall with the share of wrong answers: alone they say nothing.
    """
    now, first = _progress(history), _place(history, _first([record.reward_mean for record in history]))
    return now >= SOLVED or now - first >= PAID_FOR * (1.0 - first)


def _rising(history: Sequence[StepRecord]) -> bool:
    """The last window's reward is above the one before it. Too short a history counts as rising."""
    if len(history) < 2 * WINDOW:
        return True
    rewards = [record.reward_mean for record in history]
    return _rose(_first(rewards[-2 * WINDOW :]), _recent(history, rewards), _spread(history)[1])


def _gained(history: Sequence[StepRecord]) -> bool:
    """The last window's reward is above the first one's."""
    rewards = [record.reward_mean for record in history]
    return _rose(_first(rewards), _recent(history, rewards), _spread(history)[1])


def _rose(before: float | None, after: float | None, spread: float) -> bool:
    return before is not None and after is not None and after - before > RISE * spread
