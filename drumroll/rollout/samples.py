"""From scored groups to training samples: which rollouts train, with what advantages, in which optimizer step.

    samples = from_groups(groups)              every rollout with a verdict
    ... old and reference log-probs, and a critic's values, are filled in where the algorithm needs them ...
    samples = with_advantages(samples, groups, algorithm, max_tokens)
    for batch in minibatches(samples, algorithm.minibatches): one optimizer step

All pure; order is group order everywhere. What carries loss is decided by length: the response's tokens, the end token included, whatever
its id. Nothing looks for an end or padding id, so a padding id equal to the end id, or a second end id, cannot drop or add a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from drumroll.algorithms import advantage, kl
from drumroll.algorithms.filters import is_overlong, shape_overlong
from drumroll.algorithms.presets import Algorithm
from drumroll.errors import RunError
from drumroll.types import Group, Prompt, Rollout, TrainSample

T = TypeVar("T")


def from_groups(groups: Sequence[Group]) -> list[TrainSample]:
    """One sample a rollout that has a verdict and at least one token; advantages are still missing."""
    return [
        _sample(group.prompt, rollout) for group in groups for rollout in group.rollouts if rollout.reward is not None and rollout.token_ids
    ]


def with_advantages(samples: Sequence[TrainSample], groups: Sequence[Group], algorithm: Algorithm, max_tokens: int) -> list[TrainSample]:
    """The samples with their advantages (and, with a critic, returns), without the over-long ones where the algorithm masks them.

    Rewards are the rollouts', plus the length penalty (`overlong: shape`), minus the KL (`kl.where: reward`), in this order. A response
    that is over-long and masked carries no loss, but its reward is a verdict and stays in its group's baseline (DAPO, section 3.4).
    """
    rewards = shaped_rewards(samples, groups, algorithm, max_tokens)
    rollouts = {(group.prompt.group_id, rollout.index): rollout for group in groups for rollout in group.rollouts}
    masked = {key for key, rollout in rollouts.items() if algorithm.overlong == "mask" and is_overlong(rollout)}
    kept = [sample for sample in samples if (sample.group_id, sample.index) not in masked]
    if algorithm.advantage == "gae":
        reward_of = _by_sample(groups, rewards)
        return _estimated(kept, [reward_of[sample.group_id, sample.index] for sample in kept], algorithm)
    advantage_of = _by_sample(groups, advantage.compute(algorithm.advantage, rewards))
    return [
        replace(sample, advantages=np.full(sample.n_targets, advantage_of[sample.group_id, sample.index], dtype=np.float32))
        for sample in kept
    ]


def _by_sample(groups: Sequence[Group], rows: Sequence[Sequence[T]]) -> dict[tuple[int, int], T]:
    """(group, sample within it) -> its entry in `rows`, which have the shape of `groups`."""
    return {
        (group.prompt.group_id, rollout.index): entry
        for group, row in zip(groups, rows, strict=True)
        for rollout, entry in zip(group.rollouts, row, strict=True)
    }


def _estimated(samples: Sequence[TrainSample], rewards: Sequence[float | None], algorithm: Algorithm) -> list[TrainSample]:
    """Advantages of every token by GAE over the critic's values, whitened over all of them, and the returns that the critic is to learn.

    A response cut by its limit ends there like any other: the value after its last token is 0.
    """
    if not samples:
        return []
    lengths = [sample.n_targets for sample in samples]
    mask_BT = np.arange(max(lengths)) < np.array(lengths)[:, None]
    rewards_BT, values_BT = np.zeros(mask_BT.shape), np.zeros(mask_BT.shape)
    for row, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        if sample.values is None or reward is None:
            raise RunError(f"group {sample.group_id} sample {sample.index}: GAE needs its reward and the critic's values first")
        rewards_BT[row, : lengths[row]] = token_rewards(sample, reward, algorithm)
        values_BT[row, : lengths[row]] = sample.values
    advantages_BT, returns_BT = advantage.gae(rewards_BT, values_BT, mask_BT, algorithm.gamma, algorithm.lam)
    advantages_BT = advantage.whiten(advantages_BT, mask_BT)
    return [
        replace(sample, advantages=advantages_T[:n].astype(np.float32), returns=returns_T[:n].astype(np.float32))
        for sample, n, advantages_T, returns_T in zip(samples, lengths, advantages_BT, returns_BT, strict=True)
    ]


def token_rewards(sample: TrainSample, reward: float, algorithm: Algorithm) -> np.ndarray:
    """The reward of every token, float64 [N]: the sample's on its last one, minus the KL of each (Ouyang et al. 2022, equation 2)."""
    rewards_N = np.zeros(sample.n_targets)
    if algorithm.kl_in_reward:
        rewards_N -= algorithm.kl.coef * _token_kl(sample, algorithm.kl.estimator)
    rewards_N[-1] += reward
    return rewards_N


def shaped_rewards(
    samples: Sequence[TrainSample], groups: Sequence[Group], algorithm: Algorithm, max_tokens: int
) -> list[list[float | None]]:
    """The rewards of whole samples, in the shape of `groups`; None: no verdict. With a critic KL is taken off token by token, not here."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    if algorithm.overlong == "shape":
        lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
        rewards = [shape_overlong(r, n, max_tokens, algorithm.overlong_buffer) for r, n in zip(rewards, lengths, strict=True)]
    if algorithm.kl_in_reward and not algorithm.needs_critic:
        of = {(sample.group_id, sample.index): float(_token_kl(sample, algorithm.kl.estimator).sum()) for sample in samples}
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


def _token_kl(sample: TrainSample, estimator: kl.Estimator) -> np.ndarray:
    """KL of the sampling policy (trainer's log-probs) to the reference, token by token: float64 [N], nats."""
    if sample.old_logprobs is None or sample.ref_logprobs is None:
        raise RunError(f"group {sample.group_id} sample {sample.index}: KL in the reward needs old and reference log-probs first")
    old, ref = torch.from_numpy(sample.old_logprobs).double(), torch.from_numpy(sample.ref_logprobs).double()
    return kl.estimate(estimator, old, ref).numpy()
