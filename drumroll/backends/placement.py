"""What sets one torch backend apart from another: where parameters, gradients and optimizer state lie.

A backend is the shared engine (`engine.py`) over one Placement; placements do not inherit from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.division import Division
from drumroll.models.scorer import Scorer


class Placement(Protocol):
    def check(self, ctx: RankContext) -> None:
        """Raises UserError where this placement cannot run at all."""

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        """Lay out the parameters of a scorer that is still on the meta device, and give them memory; their values come after."""

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        """The module to call, once parameters are loaded. Collective."""

    @property
    def averaged_over(self) -> int:
        """Ranks over which gradients are averaged; the loss is multiplied by it, so that they are summed."""

    @property
    def division(self) -> Division:
        """Where parameters lie, once they have a place."""

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch, the `last` one before a step or not: are gradients reduced after it?"""

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's piece of what has been accumulated: a plain tensor where it is the whole, else a DTensor; shares its storage."""

    def after_forward(self) -> None:
        """A forward pass without a backward is over: free what it unsharded."""

    def after_update(self) -> None:
        """Pieces have been stepped or restored: bring the rest of what the module holds in line with them. Collective."""

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make accumulated gradients zero or absent."""

    def unsharded(self) -> list[torch.Tensor]:
        """Tensors held now beyond the parameters' and gradients' own: gathered parameters, gradients not yet reduced."""
