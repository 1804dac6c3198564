"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1): as DDP, but a rank keeps optimizer state of its own rows only.

Gradients are all-reduced as in DDP; each rank steps its rows of every parameter, and an all-gather brings them to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.division import Division, OwnedRows
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint
from drumroll.backends.replicas import all_reducing, check_replicas, share_rows
from drumroll.backends.rows import Rows
from drumroll.config import Section
from drumroll.models import build
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.zero1.*`"""

    grad_sync: Literal["every", "last"] = Field(
        "last", description="reduce gradients after the last micro-batch of a step only, or after every one; memory is the same"
    )
    bucket_mb: float = Field(
        25.0, gt=0, description="size of the buckets in which gradients are reduced while backward goes on", examples=[0.01]
    )


class Zero1Placement:
    def __init__(self, options: Config) -> None:
        self._options = options
        self._wrapped: DistributedDataParallel | None = None
        self.averaged_over = 1

    def check(self, ctx: RankContext) -> None:
        pass

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        self._rows = Rows(init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",)))
        self.division: Division = OwnedRows(self._rows)
        scorer.cast_parameters = True
        build.materialise(scorer, ctx.device)

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        check_replicas(scorer, ctx.device)
        self._trainable = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        if not self._trainable:
            return scorer  # forward-only: there is nothing to reduce
        self.averaged_over = ctx.world_size
        self._wrapped = all_reducing(scorer, self._options.bucket_mb)
        return self._wrapped

    def sync(self, last: bool) -> AbstractContextManager[None]:
        if last or self._options.grad_sync == "every" or self._wrapped is None:
            return nullcontext()
        return self._wrapped.no_sync()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if parameter.grad is None else self._rows.dtensor(self._rows.cut(parameter.grad), parameter.shape)

    def after_forward(self) -> None:
        pass

    def after_update(self) -> None:
        share_rows(self._rows, self._trainable)

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """In place: gradients are views of the reducer's buckets, whose memory stays anyway."""
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    def unsharded(self) -> list[torch.Tensor]:
        return []


def footprint(options: Config, ranks: int) -> Footprint:
    """Optimizer state divided; gradients are views of the reducer's buckets, which stay."""
    return Footprint(optimizer=ranks, every_micro=options.grad_sync == "every", gradients_stay=True)


PLUGIN = TorchPlugin(Config, Zero1Placement, footprint)
