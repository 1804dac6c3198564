"""What a critic says of a batch, and how well it foresaw it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from drumroll.observe.metrics import CriticFacts, mean, mean_sum
from drumroll.types import StepStats, TrainSample


def critic_facts(updates: Sequence[StepStats], samples: Sequence[TrainSample], lr: float) -> CriticFacts:
    """`samples`: of the batch, with the values from before the optimizer steps, and returns. As `update_facts` where there are none."""
    applied = [update.grad_norm for update in updates if not update.skipped]
    values = [sample.values for sample in samples if sample.values is not None]
    returns = [sample.returns for sample in samples if sample.returns is not None]
    return CriticFacts(
        value_loss=mean_sum(updates, "loss"),
        value_mean=_mean_of(values),
        return_mean=_mean_of(returns),
        explained_variance=explained_variance(values, returns),
        value_clip_share=mean(updates, "value_clipped"),
        critic_grad_norm=fmean(applied) if applied else float("nan"),
        critic_lr=lr,
        critic_skipped_steps=len(updates) - len(applied),
    )


def _mean_of(arrays: Sequence[np.ndarray]) -> float | None:
    flat = np.concatenate([np.zeros(0), *arrays])
    return float(flat.mean()) if flat.size else None


def explained_variance(values: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> float | None:
    """1 - Var(R - V) / Var(R) over all tokens of a batch: 1 at best, 0 for a constant, below 0 for worse than that.

    One array a sample. None where returns do not differ: there is nothing to explain.
    """
    flat_returns = np.concatenate([np.zeros(0), *returns]).astype(np.float64)
    flat_values = np.concatenate([np.zeros(0), *values]).astype(np.float64)
    if not flat_returns.size or flat_returns.max() == flat_returns.min():
        return None
    return float(1.0 - (flat_returns - flat_values).var() / flat_returns.var())
