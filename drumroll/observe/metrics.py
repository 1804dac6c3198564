"""The records of a run: one `StepRecord` a step, one `EvalRecord` an evaluation, one `RolloutRecord` a sampled response.

Their fields are the keys of `metrics.jsonl`, `evals.jsonl` and `rollouts.jsonl`; `docs/records.md` documents each one.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

from drumroll.observe.timer import PhaseSeconds
from drumroll.types import FinishReason, Group, Rollout, Stat, StepStats, Stream, TrainSample

StepPhase = Literal["sft", "rl"]


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
    kl: float | None = None  # nats, k3 estimate of KL(policy || reference), mean over those tokens
    kl_old: float | None = None  # nats, k3 estimate of KL(policy that sampled || policy), mean over those tokens
    clip_share: float | None = None  # share of those tokens whose gradient the clip removed
    advantage_abs_mean: float | None = None  # mean |advantage| over those tokens
    router_balance: float | None = None  # how unevenly sequences are routed to experts, 1 at best; mean over them (router_aux_coef > 0)
    # the critic, where the algorithm has one
    value_loss: float | None = None  # mean over its optimizer steps
    value_mean: float | None = None  # of the values before the update, over tokens
    return_mean: float | None = None  # of what it is to learn, over tokens
    explained_variance: float | None = None  # 1 - Var(return - value) / Var(return), values from before the update
    value_clip_share: float | None = None  # share of tokens whose gradient the value clip removed
    critic_grad_norm: float | None = None  # as `grad_norm`
    critic_lr: float | None = None  # its learning rate at the beginning of the step
    critic_skipped_steps: int = 0
    # the sampler against the trainer: |engine log-prob - trainer log-prob| of the same tokens, nats
    logprob_gap_mean: float | None = None
    logprob_gap_max: float | None = None
    logprob_gap_share: float | None = None  # share of tokens beyond the bound of `algorithms.loss`, 0.1 nats
    # the rollouts
    reward_mean: float | None = None  # over rollouts with a verdict
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # mean of each reward function, before weights
    groups: int = 0
    rollouts: int = 0
    tokens: int = 0  # tokens of prompts (once a group) and responses
    no_variance_share: float | None = None  # share of groups whose rewards are all equal: they teach nothing; of one sample each: None
    abstentions: int = 0  # rollouts without a verdict, left out of training
    left_out: int = 0  # prompts over data.max_prompt_tokens passed over so far, never sampled from
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
    tokens_per_second: float = 0.0  # tokens / seconds_total
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
class DigestRecord:
    """One line of `digests.jsonl`: every weight as it is after a step."""

    step: int  # of the run's pipeline; 0: before the first
    # HF name (adapters: that of PEFT; a critic's below `critic.`) -> digest of the float32 tensor (drumroll.digest), 16 hexadecimal digits
    digests: dict[str, str]


@dataclass(slots=True, frozen=True, kw_only=True)
class EventRecord:
    """One line of `events.jsonl`: something that happened to the run and is no number of a step."""

    time: float = field(default_factory=time.time)  # seconds since 1970
    step: int  # steps recorded when it happened, warm-up apart
    kind: str  # restart, reward (what ended the run), or the kind of an alarm
    text: str


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
    """What the rollouts of a batch say together; the fields are those of `StepRecord`."""

    groups: int
    rollouts: int
    tokens: int
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
    """What the optimizer steps of one step say together; the fields are those of `StepRecord`."""

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
    kl_old: float | None
    clip_share: float | None
    advantage_abs_mean: float | None
    router_balance: float | None
    logprob_gap_mean: float | None
    logprob_gap_max: float | None
    logprob_gap_share: float | None


@dataclass(slots=True, frozen=True, kw_only=True)
class CriticFacts:
    """What a critic says of a batch, and its optimizer steps say together; the fields are those of `StepRecord`."""

    value_loss: float
    value_mean: float | None
    return_mean: float | None
    explained_variance: float | None
    value_clip_share: float | None
    critic_grad_norm: float
    critic_lr: float
    critic_skipped_steps: int


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
        no_variance_share=_share([not _varies(group) for group in groups if len(group.rollouts) > 1]),
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


def update_facts(updates: Sequence[StepStats], lr: float) -> UpdateFacts:
    """Merge the optimizer steps of one step, from the stats that `drumroll.algorithms.loss` documents.

    Without an applied optimizer step the gradient norm is NaN; without any, the loss is 0.
    """
    applied = [update.grad_norm for update in updates if not update.skipped]
    logprob, gap = _merged(updates, "logprob"), _merged(updates, "logprob_gap")
    return UpdateFacts(
        loss=mean_sum(updates, "loss"),
        loss_abs=mean_sum(updates, "loss_abs"),
        grad_norm=fmean(applied) if applied else float("nan"),
        lr=lr,
        optimizer_steps=len(updates),
        skipped_steps=len(updates) - len(applied),
        train_tokens=logprob.count,
        logprob_mean=logprob.mean,
        entropy=mean(updates, "entropy"),
        kl=mean(updates, "kl_ref"),
        kl_old=mean(updates, "kl_old"),
        clip_share=mean(updates, "clipped"),
        advantage_abs_mean=mean(updates, "advantage_abs"),
        router_balance=mean(updates, "router_balance"),
        logprob_gap_mean=mean(updates, "logprob_gap"),
        logprob_gap_max=gap.max if gap.count else None,
        logprob_gap_share=mean(updates, "logprob_gap_high"),
    )


def mean_sum(updates: Sequence[StepStats], name: str) -> float:
    """Mean over the updates of a stat whose value is its sum."""
    return fmean(update.stats[name].sum if name in update.stats else 0.0 for update in updates) if updates else 0.0


def _merged(updates: Sequence[StepStats], name: str) -> Stat:
    merged = Stat()
    for update in updates:
        merged = merged.merge(update.stats.get(name, Stat()))
    return merged


def mean(updates: Sequence[StepStats], name: str) -> float | None:
    """Of a stat over all the updates' tokens; None where none had it."""
    stat = _merged(updates, name)
    return stat.mean if stat.count else None


def rl_record(
    *,
    step: int,
    version: int,
    tokens_digest: str,
    update: UpdateFacts,
    rollouts: RolloutFacts,
    critic: CriticFacts | None = None,
    seconds: PhaseSeconds,
    peak_bytes: int,
    left_out: int = 0,
) -> StepRecord:
    """The record of one RL step; `version` is the weight version that sampled it, `rollouts` says what was drawn, trained on or not."""
    return StepRecord(
        phase="rl",
        step=step,
        version=version,
        tokens_digest=tokens_digest,
        peak_bytes=peak_bytes,
        left_out=left_out,
        **asdict(update),
        **(asdict(critic) if critic is not None else {}),
        **asdict(rollouts),
        **_speed(seconds, rollouts.tokens),
    )


def sft_record(*, step: int, tokens_digest: str, tokens: int, update: UpdateFacts, seconds: PhaseSeconds, peak_bytes: int) -> StepRecord:
    """The record of one SFT step; `tokens` counts prompts and completions."""
    return StepRecord(
        phase="sft",
        step=step,
        version=0,
        tokens_digest=tokens_digest,
        tokens=tokens,
        peak_bytes=peak_bytes,
        **asdict(update),
        **_speed(seconds, tokens),
    )


def _speed(seconds: PhaseSeconds, tokens: int) -> dict[str, Any]:
    phases = {f"seconds_{name}": value for name, value in asdict(seconds).items()}
    return {**phases, "tokens_per_second": tokens / seconds.total if seconds.total > 0 else 0.0}


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


def rollout_records(groups: Sequence[Group], *, phase: Stream, step: int, samples: Sequence[TrainSample] = ()) -> list[RolloutRecord]:
    """A record a rollout. `samples`: those that were trained on, with their advantages; none for an evaluation."""
    advantages = {(s.group_id, s.index): float(s.advantages.mean()) for s in samples if s.advantages is not None and s.n_targets}
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
            advantage=advantages.get((group.prompt.group_id, rollout.index)),
            finish_reason=rollout.finish_reason,
            tokens=len(rollout.token_ids),
            token_ids=rollout.token_ids,
            columns=_json_columns(group.prompt.columns),
        )
        for group in groups
        for rollout in group.rollouts
    ]


def _json_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, plain) or _is_plain_list(value, plain) else repr(value) for name, value in columns.items()}


def _is_plain_list(value: Any, plain: tuple[type, ...]) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, plain) for item in value)


