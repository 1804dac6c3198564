"""Parameters that lie end to end in flat tensors, cut into equal shards whatever lies where: FSDP1's division."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drumroll.backends.clip import local_part
from drumroll.backends.rows import Cut, Rows, gather
from drumroll.backends.shards import Later
from drumroll.models.stream import Held


@dataclass(slots=True, frozen=True)
class Span:
    """Where a parameter lies: elements [offset, offset + numel) of a flat tensor that is cut into equal shards."""

    offset: int
    shape: torch.Size
    shard: int  # elements of a shard, padding included

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def ranks(self) -> range:
        """Those that hold some of it."""
        return range(self.offset // self.shard, -(-(self.offset + self.numel) // self.shard))

    def held(self, rank: int) -> tuple[int, int]:
        """First element of the flattened parameter, and number of elements, that `rank` holds."""
        first, last = (min(max(edge * self.shard - self.offset, 0), self.numel) for edge in (rank, rank + 1))
        return first, last - first

    def in_shard(self, rank: int) -> slice:
        """Where they lie in the shard of `rank`."""
        start, numel = self.held(rank)
        at = self.offset + start - rank * self.shard if numel else 0
        return slice(at, at + numel)


def spans(shapes: Sequence[torch.Size], numels: Sequence[int], padding: Sequence[bool], shard: int) -> list[Span]:
    """One a parameter of a unit.

    `shapes`: of its parameters, in order. `numels`: of what lies in its flat tensor, parameters and, where `padding`, fill between them.
    """
    offsets = accumulate(numels[:-1], initial=0)
    starts = [offset for offset, fill in zip(offsets, padding, strict=True) if not fill]
    return [Span(offset, shape, shard) for offset, shape in zip(starts, shapes, strict=True)]


@dataclass(slots=True)
class Run:
    """Elements [begin, end) of a buffer, all of them from one rank."""

    rank: int
    begin: int
    end: int


def runs(parameters: Sequence[Span]) -> list[Run]:
    """Who holds what of the parameters, laid end to end; as few runs as possible."""
    found: list[Run] = []
    for span in parameters:
        for rank in span.ranks:
            begin, numel = found[-1].end if found else 0, span.held(rank)[1]
            if found and found[-1].rank == rank:
                found[-1].end += numel
            else:
                found.append(Run(rank, begin, begin + numel))
    return found


class HeldSpans:
    """Every rank holds, and owns, the part of a parameter that its shards have; checkpoints have rows, as of other backends."""

    def __init__(self, rows: Rows, places: Mapping[nn.Parameter, Span], shard: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """`shard`: this rank's shard of the flat tensor in which a parameter lies."""
        self._rows = rows
        self._places = places
        self._shard = shard
        self.group: dist.ProcessGroup | None = rows.group

    def held(self, parameter: nn.Parameter) -> Held:
        span = self._places[parameter]
        return Held(self._shard(parameter)[span.in_shard(self._rows.rank)], span.held(self._rows.rank)[0], span.shape)

    def owned(self, parameter: nn.Parameter) -> Held:
        return self.held(parameter)

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.gather(parameters, parts)

    @torch.no_grad()
    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every run is broadcast by the rank that holds it.

        Not an all-gather: one rank may hold all that is asked for, and every other would have to send padding of the same size.
        """
        places = [self._places[parameter] for parameter in parameters]
        buffer = torch.empty(sum(span.numel for span in places), dtype=pieces[0].dtype, device=pieces[0].device)
        wholes = buffer.split([span.numel for span in places])
        for span, piece, whole in zip(places, pieces, wholes, strict=True):
            start, numel = span.held(self._rows.rank)
            whole[start : start + numel] = piece
        group = self._rows.group
        sent = [
            dist.broadcast(buffer[run.begin : run.end], dist.get_global_rank(group, run.rank), group=group, async_op=True)
            for run in (runs(places) if self._rows.ranks > 1 else ())
        ]
        for work in sent:
            work.wait()
        return [whole.view(span.shape) for span, whole in zip(places, wholes, strict=True)]

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> Later:
        """Rows that are cut from the whole tensor, which is gathered for it and dropped."""
        shape = self._places[parameter].shape

        def make() -> DTensor:
            (whole,) = self.gather([parameter], [piece])
            return self._rows.dtensor(self._rows.cut(whole).clone(), shape)

        return Later(self._rows.dtensor(self._rows.cut(torch.empty(shape, dtype=piece.dtype, device="meta")), shape), make)

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        (whole,) = gather([local_part(stored)], [Cut(self._rows, stored.shape)])
        piece.copy_(whole.view(-1).narrow(0, self.owned(parameter).start, piece.numel()))
