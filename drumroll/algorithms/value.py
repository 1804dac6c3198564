"""What a critic learns: the other half of an actor-critic. Legend as in `loss.py`.

Stats of `value_loss`, float32 [N] each; reported as means over tokens, but `loss_abs` as its sum:

    value          the critic's, now
    return         what it is to learn: advantage + value, as GAE has it before the advantages are whitened
    value_clipped  share of tokens whose gradient the clip removed
    loss_abs       |weight * term|
"""

from __future__ import annotations

import torch

from drumroll.algorithms.loss import needed, token_mean
from drumroll.types import Denominators, LossOutput, MicroBatch, TokenOutputs


def value_loss(outputs: TokenOutputs, micro: MicroBatch, denominators: Denominators, *, clip: float | None) -> LossOutput:
    """Mean over all target tokens of the step of max((V - R)^2, (V_old + clamp(V - V_old, ±clip) - R)^2) / 2.

    The clip is that of PPO's public code (Dhariwal et al. 2017, OpenAI Baselines, ppo2), used on language models by Ziegler et al. 2019; it
    is not in the paper. None: the plain squared error (Schulman et al. 2017, equation 9). Raises RunError when values or returns are
    missing.
    """
    values = needed(outputs.values, "values (ModelSpec.head)")
    returns = needed(micro.returns, "returns")
    errors = (values - returns).square()
    clipped = torch.zeros_like(errors, dtype=torch.bool)
    if clip is not None:
        old = needed(micro.values, "values from before the step (clip)")
        moved = values - old
        bound = (old + moved.clamp(-clip, clip) - returns).square()
        clipped = (bound > errors) & (moved.abs() > clip)  # within the clip the two are equal but for rounding
        errors = torch.where(clipped, bound, errors)
    weighted = token_mean(micro.target_lengths, values.shape[0], denominators, values.dtype) * 0.5 * errors
    stats = {"value": values.detach(), "return": returns, "value_clipped": clipped.float(), "loss_abs": weighted.detach().abs()}
    return LossOutput(weighted.sum(), stats)
