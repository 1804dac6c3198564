"""How training and evaluation sample: every field explicit, from the run's config."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.config import RunConfig
from drumroll.engines.base import SamplingParams


def training(config: RunConfig, eos_ids: Sequence[int]) -> SamplingParams:
    """The distribution of `rollout.*`: what is trained on."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        eos_ids=tuple(eos_ids),
        stop=rollout.stop,
    )


def evaluation(config: RunConfig, eos_ids: Sequence[int]) -> SamplingParams:
    """Greedy by default; the whole distribution at `eval.temperature` otherwise."""
    return SamplingParams(
        max_tokens=config.rollout.max_tokens, temperature=config.eval.temperature, eos_ids=tuple(eos_ids), stop=config.rollout.stop
    )
