"""From rewards to advantages: pure functions in double precision.

Rewards come as one list a group (prompt), in group order; None means no verdict. Advantages come back in the same shape: a sample without
a verdict enters no mean and no standard deviation, and its own advantage is exactly 0.0 (it is left out of training anyway).

"All rewards are equal" is asked by max == min, never by a standard deviation, which rounding makes non-zero; such a group's advantages are
exactly 0.0. A group with a single verdict has nothing to be compared with: 0.0 too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RewardKind = Literal["group", "group_mean", "leave_one_out", "batch", "group_mean_batch_std", "raw"]  # from the rewards alone: `compute`
AdvantageKind = RewardKind | Literal["gae"]  # `gae`: from a critic's values too, one a token
Rewards = Sequence[Sequence[float | None]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Added to standard deviations: nearly equal rewards (1 and 1 + 1e-12 after a weighted sum) must not become advantages of 1.
EPS = 1e-6
# Kinds that compare the samples of one prompt: they need at least two samples a prompt.
GROUP_KINDS: tuple[AdvantageKind, ...] = ("group", "group_mean", "leave_one_out", "group_mean_batch_std")


def compute(kind: RewardKind, rewards: Rewards) -> list[list[float]]:
    """Advantage of every sample, in the shape of `rewards`.

    group                 (r - mean) / (std + 1e-6) in the group, std unbiased    GRPO, Shao et al. 2024, section 4.1.2
    group_mean            r - mean in the group                                   Dr.GRPO, Liu et al. 2025, section 3.2
    leave_one_out         r - mean of the others in the group                     RLOO, Ahmadian et al. 2024, section 4
    batch                 masked whitening over the whole batch                   REINFORCE++, Hu et al. 2025
    group_mean_batch_std  r - mean in the group, over the batch's std of that     REINFORCE++ with baseline, ibid.
    raw                   r                                                       REINFORCE, Williams 1992
    """
    if not rewards:
        return []
    values = [np.array([np.nan if r is None else r for r in group], dtype=np.float64) for group in rewards]
    valid = [np.array([r is not None for r in group], dtype=np.bool_) for group in rewards]
    if kind == "raw":
        result = [np.where(mask, group, 0.0) for group, mask in zip(values, valid, strict=True)]
    elif kind == "batch":
        result = _split(whiten(_join(values), _join(valid)), [len(group) for group in values])
    elif kind == "group_mean_batch_std":
        result = _over_batch_std([_scatter(centre, group, mask) for group, mask in zip(values, valid, strict=True)], valid)
    else:
        result = [_scatter(_IN_GROUP[kind], group, mask) for group, mask in zip(values, valid, strict=True)]
    return [group.tolist() for group in result]


def centre(rewards: Floats) -> Floats:
    """r - mean; exactly 0 where all are equal. [n] -> [n]"""
    return rewards - float(rewards.mean())


def standardise(rewards: Floats) -> Floats:
    """(r - mean) / (std + 1e-6), std with n - 1 as in the public GRPO implementations. [n] -> [n]"""
    return centre(rewards) / (float(rewards.std(ddof=1)) + EPS)


def leave_one_out(rewards: Floats) -> Floats:
    """r_i - mean of r_j over j != i, that is n / (n - 1) * (r_i - mean). [n] -> [n]"""
    return centre(rewards) * (len(rewards) / (len(rewards) - 1))


def whiten(values: Floats, mask: Bools) -> Floats:
    """Masked mean 0 and masked standard deviation 1 (population); masked cells, whatever they hold, give 0 and change nothing.

    Any shape. With fewer than two valid cells there is no spread to divide by: they pass through. Equal cells give exactly 0.
    """
    valid = values[mask]
    out = np.zeros_like(values, dtype=np.float64)
    if valid.size < 2:
        out[mask] = valid
    elif valid.max() != valid.min():
        out[mask] = (valid - valid.mean()) / (valid.std() + EPS)
    return out


def gae(rewards_BT: Floats, values_BT: Floats, mask_BT: Bools, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16): advantages and returns, [B, T] each.

    Masked cells (padding, or a gap in the middle such as a tool's answer) are no time steps: they are skipped, give 0 and change nothing,
    whatever they hold. The value after the last valid cell is 0: the episode ends there.
    """
    rewards_BT, values_BT = np.where(mask_BT, rewards_BT, 0.0), np.where(mask_BT, values_BT, 0.0)
    advantages = np.zeros_like(rewards_BT)
    next_value_B = np.zeros(rewards_BT.shape[0])
    next_advantage_B = np.zeros(rewards_BT.shape[0])
    for t in reversed(range(rewards_BT.shape[1])):
        valid_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = np.where(valid_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = np.where(valid_B, values_BT[:, t], next_value_B)
        advantages[:, t] = np.where(valid_B, next_advantage_B, 0.0)
    return advantages, advantages + values_BT


_IN_GROUP: dict[RewardKind, Callable[[Floats], Floats]] = {"group": standardise, "group_mean": centre, "leave_one_out": leave_one_out}


def _scatter(fn: Callable[[Floats], Floats], rewards: Floats, mask: Bools) -> Floats:
    """Apply `fn` to the valid rewards of one group that differ; 0 everywhere else."""
    out = np.zeros_like(rewards)
    valid = rewards[mask]
    if valid.size and valid.max() != valid.min():
        out[mask] = fn(valid)
    return out


def _over_batch_std(centred: list[Floats], valid: list[Bools]) -> list[Floats]:
    # The batch mean of group-centred rewards is 0 by construction; subtracting its rounding error would move groups without variance off 0.
    joined = _join(centred)[_join(valid)]
    if joined.size < 2 or joined.max() == joined.min():
        return centred
    return [group / (joined.std() + EPS) for group in centred]


def _join(groups: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(groups)


def _split(values: Floats, lengths: Sequence[int]) -> list[Floats]:
    return np.split(values, np.cumsum(lengths)[:-1])
