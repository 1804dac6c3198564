"""Distributed data parallel (`torch.nn.parallel.DistributedDataParallel`): everything replicated, gradients all-reduced in buckets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.engine import TorchPlugin
from drumroll.config import Section
from drumroll.digest import digest
from drumroll.errors import RunError
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.ddp.*`"""

    grad_sync: Literal["every", "last"] = Field(
        "last", description="reduce gradients after the last micro-batch of a step only, or after every one; memory is the same"
    )
    bucket_mb: float = Field(25.0, gt=0, description="size of the buckets in which gradients are reduced while backward goes on")


class DdpPlacement:
    shard_group = None

    def __init__(self, options: Config) -> None:
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self.averaged_over = 1

    def check(self, ctx: RankContext) -> None:
        pass

    def shard(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        scorer.cast_parameters = True

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        _check_replicas(scorer, ctx.device)
        if not any(parameter.requires_grad for parameter in scorer.parameters()):
            return scorer  # forward-only: there is nothing to reduce
        self.averaged_over = ctx.world_size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # torch 2.11 has no other name for it
            self._wrapped = DistributedDataParallel(
                scorer,
                bucket_cap_mb=self._options.bucket_mb,
                gradient_as_bucket_view=True,  # else every gradient exists twice
                broadcast_buffers=False,
                init_sync=False,  # a broadcast would hide ranks that loaded something else; _check_replicas says so instead
            )
        return self._wrapped

    def sync(self, last: bool) -> AbstractContextManager[None]:
        if last or self._options.grad_sync == "every" or self._wrapped is None:
            return nullcontext()
        return self._wrapped.no_sync()

    def piece(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def start(self, parameter: nn.Parameter) -> int:
        return 0

    def gather(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [tensor.detach().to(dtype) for tensor in tensors]

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        return piece

    def after_forward(self) -> None:
        pass

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """In place: gradients are views of the reducer's buckets, whose memory stays anyway."""
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def unsharded(self) -> list[torch.Tensor]:
        return []


def _check_replicas(scorer: Scorer, device: torch.device) -> None:
    """Raises RunError on all ranks when a parameter or buffer differs between two of them. Collective."""
    named = [*scorer.named_parameters(), *scorer.named_buffers()]
    low = torch.tensor([digest(tensor) >> 1 for _, tensor in named], dtype=torch.int64, device=device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if different := [name for (name, _), equal in zip(named, (low == high).tolist(), strict=True) if not equal]:
        raise RunError(
            f"{len(different)} of {len(named)} tensors differ between ranks after loading, first {different[0]}; "
            "do all ranks read the same folder?"
        )


PLUGIN = TorchPlugin(Config, DdpPlacement)
