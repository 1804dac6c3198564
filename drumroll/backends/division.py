"""Where the parameters of a placed model lie: what the module of a rank holds of each, and which piece of it the rank's optimizer owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drumroll.backends.clip import local_part
from drumroll.backends.replicas import share_rows
from drumroll.backends.rows import Cut, Rows, gather
from drumroll.backends.shards import Later
from drumroll.models.stream import Held, held_whole


class Division(Protocol):
    """A *piece* is the plain tensor of what a rank owns of a parameter, of its gradient or of a moment.

    Any part is a contiguous range of the flattened whole.
    """

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks whose pieces make up a parameter; None where every piece is a whole parameter."""

    def held(self, parameter: nn.Parameter) -> Held:
        """The part that this rank's module holds between steps."""

    def owned(self, parameter: nn.Parameter) -> Held:
        """This rank's piece; shares the storage of what is held."""

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Full tensors on every rank, from the part of each that every rank's module holds, or what has been made of it.

        `parts` are of one dtype. Collective. May alias a part: read only.
        """

    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Full tensors on every rank, from everybody's pieces, of one dtype. Collective. May alias a piece."""

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor | Later:
        """`piece` (of the parameter or of a moment) as torch.distributed.checkpoint must see it, to know its place."""

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        """Bring what was loaded into `stored` back into `piece`; nothing to do where they share storage. Collective."""


class Whole:
    """Every rank holds and owns all of every parameter."""

    group = None

    def held(self, parameter: nn.Parameter) -> Held:
        return held_whole(parameter)

    def owned(self, parameter: nn.Parameter) -> Held:
        return held_whole(parameter)

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(parts)

    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(pieces)

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        return piece

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        pass


class OwnedRows:
    """Every rank holds all of a parameter, and owns some rows of it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.group: dist.ProcessGroup | None = rows.group

    def held(self, parameter: nn.Parameter) -> Held:
        return held_whole(parameter)

    def owned(self, parameter: nn.Parameter) -> Held:
        return Held(self._rows.cut(parameter.detach()), self._rows.bounds(parameter.shape)[0], parameter.shape)

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(parts)

    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return gather(pieces, [Cut(self._rows, parameter.shape) for parameter in parameters])

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        return self._rows.dtensor(piece, parameter.shape)

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        if not parameter.requires_grad:
            share_rows(self._rows, [parameter])  # those that train are shared after every update


class HeldRows:
    """Every rank holds, and owns, some rows of a parameter, and nothing else of it."""

    def __init__(self, rows: Rows, others: Mapping[nn.Parameter, Cut]) -> None:
        """`others`: parameters that are cut otherwise than by `rows`, over the same ranks."""
        self._rows = rows
        self._others = others
        self.group: dist.ProcessGroup | None = rows.group

    def _cut(self, parameter: nn.Parameter) -> Cut:
        return self._others[parameter] if parameter in self._others else Cut(self._rows, parameter.shape)

    def held(self, parameter: nn.Parameter) -> Held:
        assert isinstance(parameter, DTensor), f"expected a sharded tensor, got {type(parameter).__name__} {tuple(parameter.shape)}"
        cut = self._cut(parameter)
        return Held(local_part(parameter), cut.rows.bounds(cut.shape)[0], cut.shape)

    def owned(self, parameter: nn.Parameter) -> Held:
        return self.held(parameter)

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return gather(parts, [self._cut(parameter) for parameter in parameters])

    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return gather(pieces, [self._cut(parameter) for parameter in parameters])

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        cut = self._cut(parameter)
        return cut.rows.dtensor(piece, cut.shape)

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        pass
