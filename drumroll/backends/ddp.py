"""Distributed data parallel (`torch.nn.parallel.DistributedDataParallel`): everything replicated, gradients all-reduced in buckets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.division import Whole
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint
from drumroll.backends.replicas import all_reducing, check_replicas
from drumroll.config import Section
from drumroll.models import build
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.ddp.*`"""

    grad_sync: Literal["every", "last"] = Field(
        "last", description="reduce gradients after the last micro-batch of a step only, or after every one; memory is the same"
    )
    bucket_mb: float = Field(
        25.0, gt=0, description="size of the buckets in which gradients are reduced while backward goes on", examples=[0.01]
    )


class DdpPlacement:
    division = Whole()

    def __init__(self, options: Config) -> None:
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self.averaged_over = 1

    def check(self, ctx: RankContext) -> None:
        pass

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        scorer.cast_parameters = True
        build.materialise(scorer, ctx.device)

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        check_replicas(scorer, ctx.device)
        if not any(parameter.requires_grad for parameter in scorer.parameters()):
            return scorer  # forward-only: there is nothing to reduce
        self.averaged_over = ctx.world_size
        self._wrapped = all_reducing(scorer, self._options.bucket_mb)
        return self._wrapped

    def sync(self, last: bool) -> AbstractContextManager[None]:
        if last or self._options.grad_sync == "every" or self._wrapped is None:
            return nullcontext()
        return self._wrapped.no_sync()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def after_forward(self) -> None:
        pass

    def after_update(self) -> None:
        pass

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """In place: gradients are views of the reducer's buckets, whose memory stays anyway."""
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def unsharded(self) -> list[torch.Tensor]:
        return []


def footprint(options: Config, ranks: int) -> Footprint:
    """Everything whole on every rank; gradients are views of the reducer's buckets, which stay."""
    return Footprint(every_micro=options.grad_sync == "every", gradients_stay=True)


PLUGIN = TorchPlugin(Config, DdpPlacement, footprint)
