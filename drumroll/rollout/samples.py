"""From scored groups to training samples: which rollouts train, with what advantages, in which optimizer step.

    samples = from_groups(groups)              every rollout with a verdict
    ... old and reference log-probs are filled in where the algorithm needs them ...
    samples = with_advantages(samples, groups, algorithm, max_tokens)
    for batch in minibatches(samples, algorithm.minibatches): one optimizer step

All pure; order is group order everywhere. What carries loss is decided by length: the response's tokens, the end token included, whatever
its id. Nothing looks for an end or padding id, so a padding id equal to the end id, or a second end id, cannot drop or add a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from drumroll.algorithms import advantage, kl
from drumroll.algorithms.filters import is_overlong, shape_overlong
from drumroll.algorithms.presets import Algorithm
from drumroll.errors import RunError
from drumroll.types import Group, Prompt, Rollout, TrainSample


def from_groups(groups: Sequence[Group]) -> list[TrainSample]:
    """One sample a rollout that has a verdict and at least one token; advantages are still missing."""
    return [
        _sample(group.prompt, rollout) for group in groups for rollout in group.rollouts if rollout.reward is not None and rollout.token_ids
    ]


def with_advantages(samples: Sequence[TrainSample], groups: Sequence[Group], algorithm: Algorithm, max_tokens: int) -> list[TrainSample]:
    """The samples with their advantages, without the over-long ones where the algorithm masks them.

    Rewards are the rollouts', plus the length penalty (`overlong: shape`), minus the KL (`kl.where: reward`), in this order. A response
    that is over-long and masked carries no loss, but its reward is a verdict and stays in its group's baseline (DAPO, section 3.4).
    """
    rewards = shaped_rewards(samples, groups, algorithm, max_tokens)
    advantages = advantage.compute(algorithm.advantage, rewards)
    value = {
        (group.prompt.group_id, rollout.index): (a, algorithm.overlong == "mask" and is_overlong(rollout))
        for group, row in zip(groups, advantages, strict=True)
        for rollout, a in zip(group.rollouts, row, strict=True)
    }
    return [
        replace(sample, advantages=np.full(sample.n_targets, a, dtype=np.float32))
        for sample in samples
        for a, masked in (value[sample.group_id, sample.index],)
        if not masked
    ]


def shaped_rewards(
    samples: Sequence[TrainSample], groups: Sequence[Group], algorithm: Algorithm, max_tokens: int
) -> list[list[float | None]]:
    """The rewards that advantages are computed from, in the shape of `groups`; None: no verdict."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    if algorithm.overlong == "shape":
        lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
        rewards = [shape_overlong(r, n, max_tokens, algorithm.overlong_buffer) for r, n in zip(rewards, lengths, strict=True)]
    if algorithm.kl_in_reward:
        of = {(sample.group_id, sample.index): _sequence_kl(sample, algorithm.kl.estimator) for sample in samples}
        kls = [[of.get((group.prompt.group_id, rollout.index), 0.0) for rollout in group.rollouts] for group in groups]
        rewards = kl.penalise(rewards, kls, algorithm.kl.coef)
    return rewards


def minibatches(samples: Sequence[TrainSample], k: int) -> list[list[TrainSample]]:
    """Cut a rollout batch into k mini-batches of whole groups, in group order; sizes differ by at most one group.

    Groups of which nothing is left do not count, so no mini-batch is empty; fewer groups than k give one mini-batch a group.
    """
    order = list(dict.fromkeys(sample.group_id for sample in samples))
    parts = min(k, len(order))
    part_of = {group_id: position * parts // len(order) for position, group_id in enumerate(order)}
    batches: list[list[TrainSample]] = [[] for _ in range(parts)]
    for sample in samples:
        batches[part_of[sample.group_id]].append(sample)
    return batches


def _sample(prompt: Prompt, rollout: Rollout) -> TrainSample:
    token_ids = np.array([*prompt.token_ids, *rollout.token_ids], dtype=np.int64)
    target_mask = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return TrainSample(
        token_ids=token_ids,
        target_mask=target_mask,
        engine_logprobs=np.array(rollout.logprobs, dtype=np.float32),
        group_id=prompt.group_id,
        index=rollout.index,
    )


def _sequence_kl(sample: TrainSample, estimator: kl.Estimator) -> float:
    """Sum over the response of the per-token KL of the sampling policy (trainer's log-probs) to the reference, nats."""
    if sample.old_logprobs is None or sample.ref_logprobs is None:
        raise RunError(f"group {sample.group_id} sample {sample.index}: KL in the reward needs old and reference log-probs first")
    old, ref = torch.from_numpy(sample.old_logprobs).double(), torch.from_numpy(sample.ref_logprobs).double()
    return float(kl.estimate(estimator, old, ref).sum())
