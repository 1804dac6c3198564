"""The contract of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Optimizer(Protocol):
    """Steps pieces in place. All state exists from the start: it has the same names before the first step as after it."""

    @property
    def steps(self) -> int:
        """Updates done."""

    def step(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        """One update. `gradients`: name -> float32 tensor shaped as the piece. Collective where the optimizer needs whole matrices."""

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind -> parameter's name -> live float32 state shaped as the parameter's piece."""

    def shared(self) -> dict[str, dict[str, torch.Tensor]]:
        """Kind -> parameter's name -> live float32 state of another shape, the same on all ranks."""

    def set_steps(self, steps: int) -> None:
        """Set the number of updates done, after the state has been restored in place."""


@dataclass(slots=True, frozen=True)
class Wholes:
    """How an optimizer gets at whole tensors, one at a time: for those whose update of an element depends on all others."""

    shapes: Mapping[str, torch.Size]  # of every trainable parameter, whole
    matrices: Collection[str]  # names of the hidden layers' matrices; not embeddings, head, norms or biases
    gather: Callable[[str, torch.Tensor], torch.Tensor]  # (name, this rank's piece) -> the whole; collective, may alias the piece
    start: Callable[[str], int]  # name -> index of the piece's first element in the flattened whole

    def cut(self, name: str, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """The part of `whole` that lies where `piece` does, shaped as it."""
        return whole.reshape(-1).narrow(0, self.start(name), piece.numel()).view(piece.shape)
