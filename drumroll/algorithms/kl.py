"""KL divergence to a frozen reference, estimated from sampled tokens (Schulman 2020, "Approximating KL divergence").

For y ~ pi and d = log pi_ref(y) - log pi(y), all in nats per token; every estimator's mean is, or is near, KL(pi || pi_ref):

    k1 = -d            unbiased as a value; as a loss its expected gradient is 0 (E[grad log pi] = 0): only for rewards
    k2 = d^2 / 2       biased as a value; as a loss its on-policy gradient is exactly the gradient of KL(pi || pi_ref)
    k3 = e^d - 1 - d   unbiased as a value, never negative; as a loss its on-policy gradient is that of KL(pi_ref || pi)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]

# e^20 is 5e8: beyond it k3 is a number without meaning, and e^89 overflows fp32.
MAX_LOG_RATIO = 20.0


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log pi - log pi_ref. Any shape."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log pi - log pi_ref)^2 / 2. Any shape."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """pi_ref / pi - 1 - log(pi_ref / pi), by expm1 so that small gaps keep their digits. Any shape."""
    d = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d


ESTIMATORS: dict[Estimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimate(kind: Estimator, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token KL estimate, nats, with graph through `logprobs`. Shape of the inputs."""
    return ESTIMATORS[kind](logprobs, ref_logprobs)


def penalise(rewards: Sequence[Sequence[float | None]], kls: Sequence[Sequence[float]], coef: float) -> list[list[float | None]]:
    """KL in the reward: r - coef * (sum of the sample's per-token KL estimates), before advantages (Ouyang et al. 2022, equation 2).

    `kls`: one number a sample, in the shape of `rewards`. A sample without a verdict stays without one, whatever its KL holds.
    """
    return [
        [None if reward is None else reward - coef * kl for reward, kl in zip(group, group_kls, strict=True)]
        for group, group_kls in zip(rewards, kls, strict=True)
    ]
