"""Muon: momentum, made orthogonal, for the hidden layers' matrices; AdamW for everything else.

As torch.optim.Muon, but over pieces: momentum is kept by piece, and one matrix at a time is gathered to be made orthogonal, in float32
rather than bfloat16: rounding that depends on how gradients were summed would make placements differ by percents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from drumroll.backends.base import OptimSpec
from drumroll.backends.optim.adamw import AdamW, check_float32
from drumroll.backends.optim.base import Wholes

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: largest slope at 0
_ITERATIONS = 5
_EPSILON = 1e-7


class Muon:
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon), Nesterov momentum, decoupled weight decay.

    The update is scaled by 0.2 · sqrt(max(rows, columns)) (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that its size is AdamW's
    and one learning rate serves both.
    """

    def __init__(self, pieces: Mapping[str, torch.Tensor], spec: OptimSpec, wholes: Wholes) -> None:
        check_float32(pieces)
        self._spec = spec
        self._wholes = wholes
        self._matrices = {name: piece for name, piece in pieces.items() if name in wholes.matrices}
        self._momentum = {name: torch.zeros_like(piece) for name, piece in self._matrices.items()}
        self._rest = AdamW({name: piece for name, piece in pieces.items() if name not in wholes.matrices}, spec)

    @property
    def steps(self) -> int:
        return self._rest.steps

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        self._rest.step(gradients, lr)
        for name, piece in self._matrices.items():
            gradient, momentum = gradients[name], self._momentum[name]
            momentum.lerp_(gradient, 1 - self._spec.momentum)
            update = orthogonal(self._wholes.gather(name, gradient.lerp(momentum, self._spec.momentum)))
            piece.mul_(1 - lr * self._spec.weight_decay)
            rows, columns = update.shape
            piece.add_(self._wholes.cut(name, update, piece), alpha=-lr * 0.2 * math.sqrt(max(rows, columns)))

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"momentum": self._momentum, **self._rest.moments()}

    def shared(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def set_steps(self, steps: int) -> None:
        self._rest.set_steps(steps)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U S' V^T for matrix = U S V^T, with S' between about 0.7 and 1.2: a quintic Newton-Schulz iteration, in the dtype of `matrix`."""
    a, b, c = _COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
