"""The records of a run: one `StepRecord` a step, one `EvalRecord` an evaluation, one `RolloutRecord` a sampled response.

Their fields are the keys of `metrics.jsonl`, `evals.jsonl` and `rollouts.jsonl`; `docs/records.md` documents each one.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

from drumroll.observe.timer import PhaseSeconds
from drumroll.types import FinishReason, Group, Rollout, StepStats, Stream

StepPhase = Literal["sft", "rl"]
GAP_BOUND = 0.1  # nats; tokens whose engine and trainer log-probs differ by more are counted in `logprob_gap_share`


@dataclass(slots=True, frozen=True, kw_only=True)
class StepRecord:
    """One line of `metrics.jsonl`. None: the step has no such value (rewards in SFT, KL without a reference)."""

    phase: StepPhase
    step: int  # from 1, counted within the phase
    time: float = field(default_factory=time.time)  # seconds since 1970, at the end of the step
    version: int  # weight version that sampled the batch; 0 before any push
    tokens_digest: str  # `tokens_digest` of the batch's token ids, in the order of the batch
    # the update
    loss: float  # sum of per-token terms / denominator, mean over the optimizer steps
    loss_abs: float  # sum of |per-token term| / denominator, mean over the optimizer steps: the scale that `loss` cancels in
    grad_norm: float  # global L2 norm before clipping, mean over the optimizer steps that were applied
    lr: float  # learning rate of the last optimizer step
    optimizer_steps: int  # applied and skipped together
    skipped_steps: int  # optimizer steps skipped for a non-finite gradient norm
    train_tokens: int  # tokens that carried loss, over all optimizer steps
    logprob_mean: float  # nats, mean over those tokens
    entropy: float | None = None  # nats, mean over those tokens, of the trainer's distribution
    kl: float | None = None  # nats, mean estimate against the reference
    clip_share: float | None = None  # share of tokens whose ratio was clipped
    # the sampler against the trainer: |engine log-prob - trainer log-prob| of the same tokens, nats
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    logprob_gap_share: float | None = None  # share of tokens beyond `GAP_BOUND`
    # the rollouts
    advantage_abs_mean: float | None = None  # mean |advantage| over samples trained on
    reward_mean: float | None = None  # over rollouts with a verdict
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # mean of each reward function, before weights
    groups: int = 0
    rollouts: int = 0
    no_variance_share: float | None = None  # share of groups whose rewards are all equal: they teach nothing
    abstentions: int = 0  # rollouts without a verdict, left out of training
    prompt_tokens_mean: float | None = None
    response_tokens_mean: float | None = None
    response_tokens_max: int | None = None
    truncated_share: float | None = None  # share of responses cut by rollout.max_tokens
    # time and memory
    seconds_generate: float = 0.0
    seconds_reward: float = 0.0
    seconds_logprobs: float = 0.0
    seconds_train: float = 0.0
    seconds_sync: float = 0.0
    seconds_total: float = 0.0  # wall clock of the whole step
    tokens_per_second: float = 0.0  # tokens of prompts and responses that went through the step / seconds_total
    peak_bytes: int = 0  # most bytes held at once on the fullest rank so far
    alarms: list[str] = field(default_factory=list)  # kinds of the alarms that were on after this step


@dataclass(slots=True, frozen=True, kw_only=True)
class EvalRecord:
    """One line of `evals.jsonl`: every row of the evaluation set scored once."""

    step: int  # RL steps done before it; 0: before training
    version: int  # weight version evaluated
    time: float = field(default_factory=time.time)  # seconds since 1970
    score: float  # mean reward over rows with a verdict
    rewards: dict[str, float] = field(default_factory=dict)  # mean of each reward function, before weights
    rows: int
    abstentions: int  # rows without a verdict
    response_tokens_mean: float
    truncated_share: float
    seconds: float


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutRecord:
    """One line of `rollouts.jsonl`: one response, its reward and why."""

    phase: Stream
    step: int
    version: int
    group_id: int
    prompt_id: str
    index: int
    prompt: str
    response: str
    reward: float | None  # None: no verdict
    breakdown: dict[str, float | None]
    advantage: float | None  # mean over its tokens; None: not trained on
    finish_reason: FinishReason
    tokens: int  # of the response
    token_ids: list[int]  # of the response
    columns: dict[str, Any]  # other fields of the prompt's row, e.g. the answer; values that JSON does not know as their repr


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutFacts:
    """What the rollouts of a batch say together, a pure function of the groups."""

    groups: int
    rollouts: int
    tokens: int  # prompts (once a group) and responses
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    rewards: dict[str, float]
    no_variance_share: float | None
    abstentions: int
    prompt_tokens_mean: float | None
    response_tokens_mean: float | None
    response_tokens_max: int | None
    truncated_share: float | None


@dataclass(slots=True, frozen=True, kw_only=True)
class UpdateFacts:
    """What the optimizer steps of one step say together."""

    loss: float
    loss_abs: float
    grad_norm: float
    lr: float
    optimizer_steps: int
    skipped_steps: int
    train_tokens: int
    logprob_mean: float
    entropy: float | None
    kl: float | None
    clip_share: float | None


@dataclass(slots=True, frozen=True, kw_only=True)
class Gap:
    """|engine log-prob - trainer log-prob| of the same tokens under the same weights, nats."""

    mean: float
    max: float
    share: float  # of tokens beyond `GAP_BOUND`


def tokens_digest(batch: Sequence[Sequence[int]]) -> str:
    """16 hex digits that name the batch's token ids: their values, their order and where each list ends."""
    digest = hashlib.sha256()
    for ids in batch:
        digest.update(struct.pack(f"<q{len(ids)}q", len(ids), *ids))
    return digest.hexdigest()[:16]


def rollout_facts(groups: Sequence[Group]) -> RolloutFacts:
    """Counts, rewards and lengths of a batch. Samples without a verdict count in no reward; a group with fewer than two has no variance."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    prompts = [len(group.prompt.token_ids) for group in groups]
    return RolloutFacts(
        groups=len(groups),
        rollouts=len(rollouts),
        tokens=sum(prompts) + sum(lengths),
        reward_mean=fmean(rewards) if rewards else None,
        reward_std=pstdev(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        rewards=mean_breakdown(rollouts),
        no_variance_share=_share([not _varies(group) for group in groups]),
        abstentions=len(rollouts) - len(rewards),
        prompt_tokens_mean=fmean(prompts) if prompts else None,
        response_tokens_mean=fmean(lengths) if lengths else None,
        response_tokens_max=max(lengths, default=None),
        truncated_share=_share([rollout.finish_reason == "length" for rollout in rollouts]),
    )


def mean_breakdown(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean value of each reward function over the rollouts that it gave a verdict on; functions in order of first sight."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.breakdown.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: fmean(found) for name, found in values.items()}


def _varies(group: Group) -> bool:
    """Equality by value, not by a standard deviation, which is not exactly zero for equal rewards such as 0.1."""
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return len(rewards) > 1 and max(rewards) != min(rewards)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def measure_gap(engine: Sequence[float], trainer: Sequence[float], bound: float = GAP_BOUND) -> Gap | None:
    """Compare log-probs of the same tokens, both [N] in nats; None without a token."""
    gaps = [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
    if not gaps:
        return None
    return Gap(mean=fmean(gaps), max=max(gaps), share=sum(gap > bound for gap in gaps) / len(gaps))


def rl_record(
    *,
    step: int,
    version: int,
    tokens_digest: str,
    update: UpdateFacts,
    rollouts: RolloutFacts,
    gap: Gap | None,
    advantage_abs_mean: float,
    seconds: PhaseSeconds,
    peak_bytes: int,
) -> StepRecord:
    """The record of one RL step."""
    return StepRecord(
        phase="rl",
        step=step,
        version=version,
        tokens_digest=tokens_digest,
        advantage_abs_mean=advantage_abs_mean,
        logprob_gap_mean=gap.mean if gap else None,
        logprob_gap_max=gap.max if gap else None,
        logprob_gap_share=gap.share if gap else None,
        reward_mean=rollouts.reward_mean,
        reward_std=rollouts.reward_std,
        reward_min=rollouts.reward_min,
        reward_max=rollouts.reward_max,
        rewards=rollouts.rewards,
        groups=rollouts.groups,
        rollouts=rollouts.rollouts,
        no_variance_share=rollouts.no_variance_share,
        abstentions=rollouts.abstentions,
        prompt_tokens_mean=rollouts.prompt_tokens_mean,
        response_tokens_mean=rollouts.response_tokens_mean,
        response_tokens_max=rollouts.response_tokens_max,
        truncated_share=rollouts.truncated_share,
        **_common(update, seconds, rollouts.tokens, peak_bytes),
    )


def sft_record(*, step: int, tokens_digest: str, tokens: int, update: UpdateFacts, seconds: PhaseSeconds, peak_bytes: int) -> StepRecord:
    """The record of one SFT step; `tokens` counts prompt and target tokens."""
    return StepRecord(phase="sft", step=step, version=0, tokens_digest=tokens_digest, **_common(update, seconds, tokens, peak_bytes))


def _common(update: UpdateFacts, seconds: PhaseSeconds, tokens: int, peak_bytes: int) -> dict[str, Any]:
    return {
        "loss": update.loss,
        "loss_abs": update.loss_abs,
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "optimizer_steps": update.optimizer_steps,
        "skipped_steps": update.skipped_steps,
        "train_tokens": update.train_tokens,
        "logprob_mean": update.logprob_mean,
        "entropy": update.entropy,
        "kl": update.kl,
        "clip_share": update.clip_share,
        "seconds_generate": seconds.generate,
        "seconds_reward": seconds.reward,
        "seconds_logprobs": seconds.logprobs,
        "seconds_train": seconds.train,
        "seconds_sync": seconds.sync,
        "seconds_total": seconds.total,
        "tokens_per_second": tokens / seconds.total if seconds.total > 0 else 0.0,
        "peak_bytes": peak_bytes,
    }


def eval_record(*, step: int, version: int, groups: Sequence[Group], seconds: float) -> EvalRecord:
    """The record of one evaluation. `score` is NaN when no row had a verdict."""
    facts = rollout_facts(groups)
    return EvalRecord(
        step=step,
        version=version,
        score=float("nan") if facts.reward_mean is None else facts.reward_mean,
        rewards=facts.rewards,
        rows=facts.rollouts,
        abstentions=facts.abstentions,
        response_tokens_mean=facts.response_tokens_mean or 0.0,
        truncated_share=facts.truncated_share or 0.0,
        seconds=seconds,
    )


def rollout_records(
    groups: Sequence[Group], *, phase: Stream, step: int, advantages: Sequence[Sequence[float | None]] | None = None
) -> list[RolloutRecord]:
    """A record a rollout. `advantages`: one value (or None) a rollout, as a list a group; none for an evaluation."""
    per_group = advantages if advantages is not None else [[None] * len(group.rollouts) for group in groups]
    return [
        RolloutRecord(
            phase=phase,
            step=step,
            version=rollout.version,
            group_id=group.prompt.group_id,
            prompt_id=group.prompt.prompt_id,
            index=rollout.index,
            prompt=group.prompt.text,
            response=rollout.text,
            reward=rollout.reward,
            breakdown=rollout.breakdown,
            advantage=advantage,
            finish_reason=rollout.finish_reason,
            tokens=len(rollout.token_ids),
            token_ids=rollout.token_ids,
            columns=_json_columns(group.prompt.columns),
        )
        for group, values in zip(groups, per_group, strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
    ]


def _json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, plain) or _is_plain_list(value, plain) else repr(value) for name, value in columns.items()}


def _is_plain_list(value: Any, plain: tuple[type, ...]) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, plain) for item in value)


def update_facts(updates: Sequence[StepStats], lr: float) -> UpdateFacts:
    """Merge the optimizer steps of one step, reading the stats `loss loss_abs logprob entropy kl clipped` that the losses report.

    Every per-token stat has a value a loss-carrying token: `clipped` is 1 where the ratio was clipped. The gradient norm of a step whose
    updates were all skipped is NaN.
    """
    applied = [update for update in updates if not update.skipped]
    logprob = _merged(updates, "logprob")
    return UpdateFacts(
        loss=fmean(update.stats["loss"].sum for update in updates),
        loss_abs=fmean(update.stats["loss_abs"].sum for update in updates),
        grad_norm=fmean(update.grad_norm for update in applied) if applied else float("nan"),
        lr=lr,
        optimizer_steps=len(updates),
        skipped_steps=len(updates) - len(applied),
        train_tokens=logprob[1],
        logprob_mean=logprob[0] or 0.0,
        entropy=_merged(updates, "entropy")[0],
        kl=_merged(updates, "kl")[0],
        clip_share=_merged(updates, "clipped")[0],
    )


def _merged(updates: Sequence[StepStats], name: str) -> tuple[float | None, int]:
    """Mean (None when no update reports it) and count over all updates."""
    found = [update.stats[name] for update in updates if name in update.stats]
    count = sum(stat.count for stat in found)
    return (sum(stat.sum for stat in found) / count if count else None), count
