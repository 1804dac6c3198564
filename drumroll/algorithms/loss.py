"""Losses over flat per-token vectors: `LossFn`s that see a backend's per-token outputs, never logits or the model.

A loss is sum over target tokens of weight * term. The terms come from a policy objective, a KL penalty and an entropy bonus; the weights
are one over the global denominators, never over a count of this micro-batch, so the sum over all ranks and micro-batches is the step's loss
however the samples are split. There is no mask here: tokens without loss were never gathered, so whatever a model left there cannot
reach the loss. Zero targets give a zero that is still attached to the graph, because every rank must call backward.

Legend: N target tokens of the micro-batch, S its samples. Everything is built with `functools.partial` from functions of this module, so
that a loss can be pickled to a rank.

Stats, float32 [N] each unless said otherwise; reported as means over tokens:

    logprob, entropy     of the current policy (entropy only where the backend gave it)
    ratio, clipped       importance ratio to the old policy, share of tokens whose gradient the clip removed
    kl_old, kl_ref       k3 estimates of KL(old || current) and KL(current || reference)
    advantage_abs        |advantage|
    logprob_gap          |trainer's log-prob (old where given, else current) - engine's|, nats
    logprob_gap_high     share of tokens where it exceeds LOGPROB_GAP_BOUND
    loss_abs             |weight * term|: already divided by the denominator, so its *sum* over ranks and micro-batches is the value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from drumroll.algorithms import kl
from drumroll.errors import RunError
from drumroll.types import Denominators, LossFn, LossOutput, MicroBatch, TokenOutputs

Aggregate = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce"]

# Stats whose value is the merged `sum`, not the mean ("loss" is added by the backend).
SUMMED_STATS = ("loss", "loss_abs")
# Nats. Kernels of the engine and the trainer differ by about 1e-2 in bf16; a token beyond this was sampled from another distribution.
LOGPROB_GAP_BOUND = 0.1
# e^20 is 5e8; beyond it a ratio is no estimate of anything, and inf * advantage 0 would be NaN.
MAX_LOG_RATIO = 20.0


@dataclass(slots=True)
class PolicyTerms:
    """What a policy objective says about each token."""

    terms: torch.Tensor  # [N], to be minimised, with graph
    ratio: torch.Tensor  # [N], current over old probability
    clipped: torch.Tensor  # bool [N], no gradient flows (cispo: the weight was cut)


# (logprobs [N] with graph, old_logprobs [N], advantages [N], target_lengths int64 [S]) -> PolicyTerms
PolicyObjective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], PolicyTerms]
# (target_lengths int64 [S], N, denominators, dtype) -> [N]
TokenWeights = Callable[[torch.Tensor, int, Denominators, torch.dtype], torch.Tensor]


def rl_loss(
    outputs: TokenOutputs,
    micro: MicroBatch,
    denominators: Denominators,
    *,
    policy: PolicyObjective,
    weights: TokenWeights,
    kl_coef: float = 0.0,
    kl_estimator: kl.Estimator = "k3",
    entropy_coef: float = 0.0,
    importance_cap: float | None = None,
    old_from_engine: bool = False,
) -> LossOutput:
    """sum over tokens of weight * (policy term + kl_coef * KL to the reference - entropy_coef * entropy).

    Old log-probs are the engine's (`old_from_engine`), else `micro.old_logprobs`, else the detached current ones (one optimizer step a
    batch: the ratio is 1).
    `importance_cap`: the policy term is weighed by min(old / engine probability, cap), which corrects for an engine that samples from
    slightly other numbers than the trainer's (truncated importance sampling, Yao et al. 2025).
    Raises RunError when an input that an option needs is missing.
    """
    logprobs = needed(outputs.logprobs, "log-probs (ModelSpec.head)")
    advantages = needed(micro.advantages, "advantages")
    trainer_old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
    old = needed(micro.engine_logprobs, "engine_logprobs (old_logprobs: engine)") if old_from_engine else trainer_old
    objective = policy(logprobs, old, advantages, micro.target_lengths)
    terms = objective.terms
    if importance_cap is not None:
        engine = needed(micro.engine_logprobs, "engine_logprobs (importance_cap)")
        terms = terms * (old - engine).clamp(max=MAX_LOG_RATIO).exp().clamp(max=importance_cap)
    if kl_coef:
        terms = terms + kl_coef * kl.estimate(kl_estimator, logprobs, needed(micro.ref_logprobs, "ref_logprobs (kl.coef > 0)"))
    if entropy_coef:
        terms = terms - entropy_coef * needed(outputs.entropy, "entropy (entropy_coef)")
    weighted = weights(micro.target_lengths, logprobs.shape[0], denominators, logprobs.dtype) * terms
    stats = _token_stats(logprobs, outputs.entropy, weighted) | _policy_stats(logprobs.detach(), old, advantages, objective)
    if micro.ref_logprobs is not None:
        stats["kl_ref"] = kl.k3(logprobs.detach(), micro.ref_logprobs)
    if micro.engine_logprobs is not None:
        stats["logprob_gap"] = (trainer_old - micro.engine_logprobs).abs()
        stats["logprob_gap_high"] = (stats["logprob_gap"] > LOGPROB_GAP_BOUND).float()
    return LossOutput(weighted.sum(), stats)


def sft_loss(outputs: TokenOutputs, micro: MicroBatch, denominators: Denominators) -> LossOutput:
    """Negative log-likelihood, mean over all target tokens of the step."""
    logprobs = needed(outputs.logprobs, "log-probs (ModelSpec.head)")
    weighted = -logprobs * token_mean(micro.target_lengths, logprobs.shape[0], denominators, logprobs.dtype)
    return LossOutput(weighted.sum(), _token_stats(logprobs, outputs.entropy, weighted))


def balanced(outputs: TokenOutputs, micro: MicroBatch, denominators: Denominators, *, loss: LossFn, coef: float) -> LossOutput:
    """`loss` + coef * mean over the step's sequences of how unevenly their tokens are routed to experts (see `models/experts.py`)."""
    result = loss(outputs, micro, denominators)
    balance_S = needed(outputs.balance, "the routers' balance (ModelSpec.balance)")[micro.target_lengths > 0]
    total = result.loss + coef * balance_S.sum() / max(denominators.sequences, 1)
    return LossOutput(total, result.stats | {"router_balance": balance_S.detach()})


def ppo(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    target_lengths: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017; asymmetric: Yu et al. 2025).

    `dual_clip` c > 1: where A < 0 the objective is at least c A, so one token's ratio cannot blow up the step (Ye et al. 2020).
    """
    ratio = _bounded_ratio(logprobs - old)
    objective, clipped = _clip(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        floor = dual_clip * advantages
        below = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(below, floor, objective), clipped | below
    return PolicyTerms(-objective, ratio.detach(), clipped)


def gspo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, target_lengths: torch.Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """PPO's clip on the sequence ratio s = exp(mean over tokens of log r) (GSPO, Zheng et al. 2025, equations 5 and 7).

    Every token of a sequence carries the sequence's term, so `sequence_mean_token_mean` gives the paper's objective.
    """
    sums_S = torch.segment_reduce(logprobs - old, "sum", lengths=target_lengths, unsafe=True)
    means_S = sums_S / target_lengths.clamp(min=1)
    ratio = _bounded_ratio(_spread(means_S, target_lengths, logprobs.shape[0]))
    objective, clipped = _clip(ratio, advantages, clip_low, clip_high)
    return PolicyTerms(-objective, ratio.detach(), clipped)


def cispo(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, target_lengths: torch.Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """-detach(clip(r)) A log pi: the weight is clipped, no token loses its gradient (CISPO, MiniMax 2025, equations 4 and 5)."""
    ratio = _bounded_ratio((logprobs - old).detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyTerms(-weight * advantages * logprobs, ratio, weight != ratio)


def reinforce(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, target_lengths: torch.Tensor) -> PolicyTerms:
    """-A log pi (Williams 1992). No importance ratio: meant for one optimizer step a batch; `ratio` is only reported."""
    ratio = _bounded_ratio((logprobs - old).detach())
    return PolicyTerms(-advantages * logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def token_mean(target_lengths: torch.Tensor, n: int, denominators: Denominators, dtype: torch.dtype) -> torch.Tensor:
    """1 / tokens of the step: every token weighs the same (DAPO)."""
    return torch.full((n,), 1.0 / max(denominators.tokens, 1), dtype=dtype, device=target_lengths.device)


def sequence_mean_token_mean(target_lengths: torch.Tensor, n: int, denominators: Denominators, dtype: torch.dtype) -> torch.Tensor:
    """1 / (sequences of the step * tokens of the sequence): every sequence weighs the same (GRPO)."""
    inverse_S = 1.0 / (target_lengths.clamp(min=1).to(dtype) * max(denominators.sequences, 1))
    return _spread(inverse_S, target_lengths, n)


def sequence_mean_token_sum(target_lengths: torch.Tensor, n: int, denominators: Denominators, dtype: torch.dtype) -> torch.Tensor:
    """1 / sequences of the step: the gradient of a sequence's log-probability (RLOO, REINFORCE)."""
    return torch.full((n,), 1.0 / max(denominators.sequences, 1), dtype=dtype, device=target_lengths.device)


def constant(target_lengths: torch.Tensor, n: int, denominators: Denominators, dtype: torch.dtype, *, length: int) -> torch.Tensor:
    """1 / (sequences of the step * a fixed length): as token_sum, on the scale of a token mean (Dr.GRPO)."""
    return sequence_mean_token_sum(target_lengths, n, denominators, dtype) / length


def token_weights(aggregate: Aggregate, constant_length: int) -> TokenWeights:
    """The weight function of an aggregation mode."""
    modes: dict[Aggregate, TokenWeights] = {
        "token_mean": token_mean,
        "sequence_mean_token_mean": sequence_mean_token_mean,
        "sequence_mean_token_sum": sequence_mean_token_sum,
        "constant": partial(constant, length=constant_length),
    }
    return modes[aggregate]


def policy_objective(kind: PolicyLoss, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyObjective:
    """The objective called `kind` with its clips bound; `reinforce` reads none of them, only `ppo` reads `dual_clip`."""
    kinds: dict[PolicyLoss, PolicyObjective] = {
        "ppo": partial(ppo, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip),
        "gspo": partial(gspo, clip_low=clip_low, clip_high=clip_high),
        "cispo": partial(cispo, clip_low=clip_low, clip_high=clip_high),
        "reinforce": reinforce,
    }
    return kinds[kind]


def _clip(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r) A) and where the clipped side was taken, both [N]."""
    free = ratio * advantages
    bound = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    clipped = bound < free
    return torch.where(clipped, bound, free), clipped


def _bounded_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _spread(values_S: torch.Tensor, target_lengths: torch.Tensor, n: int) -> torch.Tensor:
    """One value a sequence -> one value a token: [S] -> [N]."""
    return torch.repeat_interleave(values_S, target_lengths, output_size=n)


def needed(tensor: torch.Tensor | None, what: str) -> torch.Tensor:
    """`tensor`. Raises RunError naming `what` when there is none."""
    if tensor is None:
        raise RunError(f"the loss needs {what} of every token, and the micro-batch has none")
    return tensor


def _token_stats(logprobs: torch.Tensor, entropy: torch.Tensor | None, weighted: torch.Tensor) -> dict[str, torch.Tensor]:
    stats = {"logprob": logprobs.detach(), "loss_abs": weighted.detach().abs()}
    if entropy is not None:
        stats["entropy"] = entropy.detach()
    return stats


def _policy_stats(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, objective: PolicyTerms) -> dict[str, torch.Tensor]:
    return {
        "ratio": objective.ratio,
        "clipped": objective.clipped.float(),
        "kl_old": kl.k3(old, logprobs),
        "advantage_abs": advantages.abs(),
    }
