"""Learning rate as a pure function of the number of optimizer steps applied so far."""

from __future__ import annotations

import math

from drumroll.config import OptimConfig


def learning_rate(optim: OptimConfig, applied: int, total: int) -> float:
    """Learning rate of the next optimizer step.

    `applied`: steps taken so far (skipped ones do not count); `total`: steps of the whole run.

    Linear warm-up from lr / warmup_steps to lr, then constant, linear or cosine (Loshchilov & Hutter 2017) down to
    lr * min_lr_ratio at `total`.
    """
    if applied < optim.warmup_steps:
        return optim.lr * (applied + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (applied - optim.warmup_steps) / max(1, total - optim.warmup_steps))
    remaining = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)
