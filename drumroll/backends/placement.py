"""What sets one torch backend apart from another: where parameters, gradients and optimizer state lie.

A backend is the shared engine (`engine.py`) over one Placement; placements do not inherit from each other. A *piece* is the plain
tensor of what this rank's optimizer owns of a parameter (or of its gradient); it shares the storage of what the module holds.
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


class Placement(Protocol):
    def check(self, ctx: RankContext) -> None:
        """Raises UserError where this placement cannot run at all."""

    def shard(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        """Lay out the parameters of a scorer that is still on the meta device."""

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        """The module whose forward trains, once parameters are loaded; `scorer` itself serves forward-only passes. Collective."""

    @property
    def averaged_over(self) -> int:
        """Ranks over which gradients are averaged; the loss is multiplied by it, so that they are summed."""

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks whose pieces make up a parameter; None where every piece is a whole parameter."""

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch, the `last` one before a step or not: are gradients reduced after it?"""

    def piece(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a parameter or gradient."""

    def start(self, parameter: nn.Parameter) -> int:
        """Index of the piece's first element in the flattened parameter."""

    def gather(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Full tensors of some parameters (or gradients) in `dtype`, on every rank. Collective. May alias a parameter: read only."""

    def stored(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        """`piece` (of the parameter or of a moment) as torch.distributed.checkpoint must see it to know its place in the whole."""

    def after_forward(self) -> None:
        """A forward pass without a backward is over: free what it unsharded."""

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make accumulated gradients zero or absent."""

    def unsharded(self) -> list[torch.Tensor]:
        """Tensors held now beyond the parameters' and gradients' own: gathered parameters, gradients not yet reduced."""
