"""Tensors cut into rows over the ranks of a mesh, as by `torch.chunk`.

Rank r owns rows [r·c, (r+1)·c) with c = ceil(rows / ranks); the last ranks may own fewer, or none. This is DTensor's `Shard(0)`, so that
whatever is cut this way is saved and loaded alike by every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


class Rows:
    """The cut over the last dimension of `mesh`; tensors are replicated over the dimensions before it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        self.group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self.ranks = mesh.size(mesh.ndim - 1)
        self.rank = mesh.get_local_rank(mesh.ndim - 1)

    def bounds(self, shape: torch.Size, rank: int | None = None) -> tuple[int, int]:
        """First element and number of elements, of the flattened tensor, that `rank` (this one, if not said) owns."""
        rank = self.rank if rank is None else rank
        chunk = -(-shape[0] // self.ranks)
        first = min(shape[0], rank * chunk)
        last = min(shape[0], first + chunk)
        row = shape[1:].numel()
        return first * row, (last - first) * row

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor, as a view."""
        start, numel = self.bounds(whole.shape)
        row = whole.shape[1:].numel()
        return whole[start // row : (start + numel) // row] if row else whole[:0]

    def gather(self, pieces: Sequence[torch.Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[torch.Tensor]:
        """Whole tensors of `shapes` in `dtype`, from everybody's pieces: one all-gather, cast before it travels. Collective."""
        flat = [piece.to(dtype).flatten() for piece in pieces]
        if self.ranks == 1:
            return [piece.view(shape) for piece, shape in zip(flat, shapes, strict=True)]
        sizes = [[self.bounds(shape, rank)[1] for shape in shapes] for rank in range(self.ranks)]
        widest = sum(sizes[0])  # rank 0 owns most of every tensor
        mine = torch.zeros(widest, dtype=dtype, device=flat[0].device)
        mine[: sum(piece.numel() for piece in flat)] = torch.cat(flat)
        everybodys = list(torch.empty(self.ranks, widest, dtype=dtype, device=mine.device).unbind())
        dist.all_gather(everybodys, mine, group=self.group)
        by_rank = [torch.split(row[: sum(numels)], numels) for row, numels in zip(everybodys, sizes, strict=True)]
        return [torch.cat([of_rank[index] for of_rank in by_rank]).view(shape) for index, shape in enumerate(shapes)]

    def dtensor(self, piece: torch.Tensor, shape: torch.Size) -> DTensor:
        """`piece` with its place in a tensor of `shape`; shares its storage."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(piece, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)
