"""What sets one torch backend apart from another: where parameters, gradients and optimizer state lie.

A backend is the shared engine (`engine.py`) over one Placement; placements do not inherit from each other. A *piece* is the plain
tensor of what this rank's optimizer owns of a parameter, of its gradient or of a moment: a contiguous range of the flattened whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.models.scorer import Scorer
from drumroll.models.stream import Held


class Placement(Protocol):
    def check(self, ctx: RankContext) -> None:
        """Raises UserError where this placement cannot run at all."""

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        """Lay out the parameters of a scorer that is still on the meta device, and give them memory; their values come after."""

    def held(self, parameter: nn.Parameter) -> Held:
        """The part of a parameter that this rank's module holds between steps."""

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        """The module to call, once parameters are loaded. Collective."""

    @property
    def averaged_over(self) -> int:
        """Ranks over which gradients are averaged; the loss is multiplied by it, so that they are summed."""

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks whose pieces make up a parameter; None where every piece is a whole parameter."""

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch, the `last` one before a step or not: are gradients reduced after it?"""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's piece of what has been accumulated: a plain tensor where it is the whole, else a DTensor; shares its storage."""

    def piece(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's piece of a parameter; shares its storage."""

    def start(self, parameter: nn.Parameter) -> int:
        """Index of the piece's first element in the flattened parameter."""

    def whole(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Full tensors, shaped as `parameters`, on every rank, from the part of each that every rank's module holds (see `held`).

        `parts`: of one dtype, such parts of the parameters, or what has been made of them. Collective. May alias a part: read only.
        """

    def gather(self, parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Full tensors, shaped as `parameters`, from everybody's pieces (of gradients or moments). Collective. May alias a piece."""

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        """`piece` (of the parameter or of a moment) as torch.distributed.checkpoint must see it, to know its place. Collective."""

    def restore(self, parameter: nn.Parameter, piece: torch.Tensor, stored: torch.Tensor) -> None:
        """Bring what was loaded into `stored` back into `piece`; nothing to do where they share storage. Collective."""

    def after_forward(self) -> None:
        """A forward pass without a backward is over: free what it unsharded."""

    def after_update(self) -> None:
        """Pieces have been stepped or restored: bring the rest of what the module holds in line with them. Collective."""

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make accumulated gradients zero or absent."""

    def unsharded(self) -> list[torch.Tensor]:
        """Tensors held now beyond the parameters' and gradients' own: gathered parameters, gradients not yet reduced."""
