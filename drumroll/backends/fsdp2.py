"""Fully sharded data parallel (`torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer state lie in rows over the ranks.

One unit a transformer block; embedding, final norm and head form the root unit, so that tied weights are in one. Rows are split as by
`torch.chunk`: rank r owns rows [r·c, (r+1)·c) with c = ceil(rows / ranks); the last ranks may own fewer, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.engine import TorchPlugin
from drumroll.config import Section
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.fsdp2.*`"""

    reshard_after_forward: bool = Field(
        True, description="free a block's gathered parameters after forward and gather them again in backward: less memory, more traffic"
    )
    grad_sync: Literal["every", "last"] = Field(
        "every",
        description="reduce gradients after every micro-batch, or only after the last: less traffic, 4 bytes a parameter more on a rank",
    )


class Fsdp2Placement:
    def __init__(self, options: Config) -> None:
        self._options = options
        self._units: list[FSDPModule] = []
        self._mesh: DeviceMesh | None = None

    def check(self, ctx: RankContext) -> None:
        pass

    def shard(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        mesh = init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",))
        low_precision = None if model.compute_dtype is torch.float32 else model.compute_dtype
        policy = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in scorer.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self._options.reshard_after_forward)
        # The root is needed again at once when backward begins: freeing it after forward would only gather it twice.
        fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self._mesh = mesh
        self._units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        return scorer

    @property
    def mesh(self) -> DeviceMesh:
        assert self._mesh is not None, "shard() comes first"
        return self._mesh

    @property
    def averaged_over(self) -> int:
        return self.mesh.size()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group()

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        if self._options.grad_sync == "last":
            for unit in self._units:
                unit.set_requires_gradient_sync(last, recurse=False)
        yield

    def piece(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor), f"expected a sharded tensor, got {type(tensor).__name__} {tuple(tensor.shape)}"
        with torch.no_grad():
            return tensor.to_local()

    def start(self, parameter: nn.Parameter) -> int:
        first, _ = _rows(parameter.shape[0], self.mesh.size(), self.mesh.get_local_rank())
        return first * parameter.shape[1:].numel()

    def gather(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """One all-gather for all of `tensors`, cast before it travels."""
        ranks = self.mesh.size()
        pieces = [self.piece(tensor).to(dtype).flatten() for tensor in tensors]
        if ranks == 1:
            return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        sizes = [[_piece_numel(tensor, ranks, rank) for tensor in tensors] for rank in range(ranks)]
        widest = sum(sizes[0])  # rank 0 owns most of every tensor
        mine = torch.zeros(widest, dtype=dtype, device=pieces[0].device)
        mine[: sum(piece.numel() for piece in pieces)] = torch.cat(pieces)
        everybodys = list(torch.empty(ranks, widest, dtype=dtype, device=mine.device).unbind())
        dist.all_gather(everybodys, mine, group=self.mesh.get_group())
        by_rank = [torch.split(flat[: sum(numels)], numels) for flat, numels in zip(everybodys, sizes, strict=True)]
        return [torch.cat([by_rank[rank][i] for rank in range(ranks)]).view(tensor.shape) for i, tensor in enumerate(tensors)]

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(piece, self.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride())

    def after_forward(self) -> None:
        for unit in self._units:
            unit.reshard()

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def unsharded(self) -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        for unit in self._units:
            group = unit._get_fsdp_state()._fsdp_param_group  # no public way leads to what a unit has gathered
            for sharded in group.fsdp_params if group is not None else ():
                if sharded.all_gather_outputs:
                    gradients = (sharded.unsharded_param.grad, sharded.unsharded_accumulated_grad)
                    held += [*sharded.all_gather_outputs, *(gradient for gradient in gradients if gradient is not None)]
        return held


def _rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row and number of rows that `rank` owns."""
    chunk = -(-rows // ranks)
    first = min(rows, rank * chunk)
    return first, min(rows, first + chunk) - first


def _piece_numel(tensor: torch.Tensor, ranks: int, rank: int) -> int:
    _, rows = _rows(tensor.shape[0], ranks, rank)
    return rows * tensor.shape[1:].numel()


PLUGIN = TorchPlugin(Config, Fsdp2Placement)
