"""Adafactor: second moments of a matrix as one row and one column, so that optimizer state all but vanishes.

torch's own arithmetic (torch.optim.Adafactor) on whole tensors, gathered one at a time: its learning rate depends on the norm of the
whole parameter and its clip on that of the whole update.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim._adafactor import adafactor

from drumroll.backends.base import OptimSpec
from drumroll.backends.optim.adamw import check_float32
from drumroll.backends.optim.base import Wholes


class Adafactor:
    """Shazeer & Stern 2018 (arXiv 1804.04235), without first moments: a matrix [rows, columns] has rows + columns numbers of state.

    Relative step size: a step is `lr` times the parameter's root mean square, `lr` being at most 1 / sqrt(steps).
    """

    def __init__(self, pieces: Mapping[str, torch.Tensor], spec: OptimSpec, wholes: Wholes) -> None:
        check_float32(pieces)
        self.steps = 0
        self._spec = spec
        self._wholes = wholes
        self._pieces = dict(pieces)
        self._vectors: dict[str, torch.Tensor] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}
        for name, piece in pieces.items():
            shape = wholes.shapes[name]
            if len(shape) > 1:
                self._rows[name] = piece.new_zeros(*shape[:-1], 1)
                self._columns[name] = piece.new_zeros(*shape[:-2], 1, shape[-1])
            else:
                self._vectors[name] = piece.new_zeros(shape)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        for name, piece in self._pieces.items():
            whole = self._wholes.gather(name, piece)
            adafactor(
                [whole],
                [self._wholes.gather(name, gradients[name])],
                [self._rows.get(name)],
                [self._columns.get(name)],
                [self._vectors.get(name)],
                [torch.tensor(float(self.steps))],
                foreach=False,
                d=1.0,
                lr=lr,
                beta2_decay=-0.8,
                weight_decay=self._spec.weight_decay,
                eps1=None,  # type: ignore[arg-type]  # torch: that of the dtype
                eps2=1e-3,
                maximize=False,
            )
            if whole.data_ptr() != piece.data_ptr() and piece.numel():
                piece.copy_(self._wholes.cut(name, whole, piece))
        self.steps += 1

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def shared(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"variance": self._vectors, "row_variance": self._rows, "column_variance": self._columns}

    def set_steps(self, steps: int) -> None:
        self.steps = steps
