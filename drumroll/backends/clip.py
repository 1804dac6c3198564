"""Global-norm clipping over plain tensors and DTensors of any meshes, from local shards.

`torch.nn.utils.clip_grad_norm_` stacks the norms of single tensors, which fails for tensors on different meshes and gives back a DTensor.
Here each shard is counted once: squares are summed over the mesh dimensions that shard a tensor and never over those that replicate it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drumroll.errors import RunError

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_: keeps the ratio finite for a zero norm


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, as a plain tensor that shares its storage."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """L2 norm of all tensors as one vector; the same float on every rank, `inf` when any element on any rank is not finite.

    Plain tensors are taken to be replicated. The order of `tensors` must be the same on all ranks: this is a collective.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_groups.setdefault(_shard_groups(tensor), []).append(local_part(tensor))
    squares = [_reduced_square(local, groups) for groups, local in by_groups.items()]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    norm = norm if math.isfinite(norm) else math.inf
    world_size = dist.get_world_size()
    if world_size == 1 or all([dist.get_world_size(group) for group in groups] == [world_size] for groups in by_groups):
        return norm  # one all-reduce over everybody gave everybody the same bits; of several in turn, over parts of them, nobody says so
    return _largest(norm, tensors[0].device) if tensors else norm


def clip_(tensors: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale `tensors` in place by max_norm / norm where the (finite) `norm` is above `max_norm`; no communication."""
    scale = max_norm / (norm + EPSILON)
    if scale < 1.0:
        torch._foreach_mul_([local_part(tensor) for tensor in tensors], scale)


def _reduced_square(local: list[torch.Tensor], groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    square = torch.nn.utils.get_total_norm(local).to(torch.float64) ** 2
    for group in groups:
        dist.all_reduce(square, group=group)
    return square


def _shard_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the mesh dimensions (of more than one rank) that shard `tensor`; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    unreduced = [p for p in tensor.placements if not (p.is_shard() or p.is_replicate())]
    if unreduced:
        raise RunError(f"cannot take the norm of a gradient placed as {tensor.placements}: expected shards or replicas, got {unreduced}")
    return tuple(mesh.get_group(dim) for dim, p in enumerate(tensor.placements) if p.is_shard() and mesh.size(dim) > 1)


def _largest(value: float, device: torch.device) -> float:
    """`value` of the rank where it is largest. Replicas that disagree (one of them poisoned) then decide alike."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)
