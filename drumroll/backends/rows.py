"""Tensors cut into rows over the ranks of a mesh, as by `torch.chunk`.

Rank r owns rows [r·c, (r+1)·c) with c = ceil(rows / ranks); the last ranks may own fewer, or none. This is DTensor's `Shard(0)`, so that
whatever is cut this way is saved and loaded alike by every backend. A cut over two dimensions of a mesh cuts what the first one made once
more, as `[Shard(0), Shard(0)]` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# torch 2.11 has the old name only; later ones warn of it. Not into a list of tensors: nccl gathers those into one of its own first.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Rows:
    """The cut over the last `cuts` dimensions of `mesh`; tensors are replicated over the dimensions before them.

    `group`: the ranks that share a tensor, needed where they are those of more than one dimension.
    """

    def __init__(self, mesh: DeviceMesh, cuts: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self._mesh = mesh
        self._placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - cuts), *[Shard(0)] * cuts)
        self.group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1) if group is None else group
        self.ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.sizes = mesh.shape[mesh.ndim - cuts :]  # of the dimensions that cut
        members = [dist.get_global_rank(self.group, rank) for rank in range(self.ranks)]
        self._places = [(mesh.mesh == member).nonzero()[0, -cuts:].tolist() for member in members]  # of each, in the dimensions that cut

    def bounds(self, shape: torch.Size, rank: int | None = None) -> tuple[int, int]:
        """First element and number of elements, of the flattened tensor, that `rank` (this one, if not said) owns."""
        first, last = 0, shape[0]
        for size, place in zip(self.sizes, self._places[self.rank if rank is None else rank], strict=True):
            chunk = -(-(last - first) // size)
            first, last = min(last, first + place * chunk), min(last, first + (place + 1) * chunk)
        row = shape[1:].numel()
        return first * row, (last - first) * row

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, as a view."""
        start, numel = self.bounds(whole.shape)
        row = whole.shape[1:].numel()
        return whole[start // row : (start + numel) // row] if row else whole[:0]

    def dtensor(self, piece: torch.Tensor, shape: torch.Size) -> DTensor:
        """`piece` with its place in a tensor of `shape`; shares its storage.

        Not `DTensor.from_local`: of a piece that is off-loaded to host memory it makes a copy on the mesh's device.
        """
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), piece.dtype)
        return DTensor(piece, DTensorSpec(self._mesh, self._placements, meta), requires_grad=False)


@dataclass(slots=True, frozen=True)
class Cut:
    """A tensor, and how it is cut."""

    rows: Rows
    shape: torch.Size  # of the whole


def gather(pieces: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> list[torch.Tensor]:
    """Whole tensors, from everybody's pieces, all of one dtype and over one group of ranks: one all-gather. Collective."""
    group, ranks = cuts[0].rows.group, cuts[0].rows.ranks
    flat = [piece.flatten() for piece in pieces]
    if ranks == 1:
        return [piece.view(cut.shape) for piece, cut in zip(flat, cuts, strict=True)]
    bounds = [[cut.rows.bounds(cut.shape, rank) for cut in cuts] for rank in range(ranks)]
    widest = sum(numel for _, numel in bounds[0])  # rank 0 owns most of every tensor
    mine = torch.zeros(widest, dtype=flat[0].dtype, device=flat[0].device)
    mine[: sum(piece.numel() for piece in flat)] = torch.cat(flat)
    everybodys = torch.empty(ranks * widest, dtype=mine.dtype, device=mine.device)
    _all_gather(everybodys, mine, group=group)
    rows = everybodys.view(ranks, widest).unbind()
    by_rank = [row[: sum(sizes)].split(sizes) for row, sizes in ((r, [n for _, n in b]) for r, b in zip(rows, bounds, strict=True))]
    wholes = []
    for index, cut in enumerate(cuts):
        in_order = sorted(range(ranks), key=lambda rank: bounds[rank][index])
        wholes.append(torch.cat([by_rank[rank][index] for rank in in_order]).view(cut.shape))
    return wholes
