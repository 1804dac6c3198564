"""One process, nothing sharded: the executable specification that every other backend is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.division import Whole
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint
from drumroll.config import Section
from drumroll.errors import UserError
from drumroll.models import build
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.single.*`: no options."""


class SinglePlacement:
    """Every parameter whole, in the one process there is."""

    averaged_over = 1
    division = Whole()

    def __init__(self, options: Config) -> None:
        pass

    def check(self, ctx: RankContext) -> None:
        if ctx.world_size != 1:
            raise UserError(f"backend.name=single runs in one process, got runtime.ranks={ctx.world_size}; use ddp or fsdp2 for more ranks")

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        scorer.cast_parameters = True
        build.materialise(scorer, ctx.device)

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        return scorer

    def sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return parameter.grad

    def after_forward(self) -> None:
        pass

    def after_update(self) -> None:
        pass

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def unsharded(self) -> list[torch.Tensor]:
        return []


def footprint(options: Config, ranks: int) -> Footprint:
    """Everything whole."""
    return Footprint()


PLUGIN = TorchPlugin(Config, SinglePlacement, footprint)
