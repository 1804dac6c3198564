"""AdamW over plain local tensors: whatever a rank owns of each parameter.

The moments exist from the start, so that saved and restored state has the same names before the first step as after it, and so that
their memory is there to be measured. The arithmetic is torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

from drumroll.backends.base import OptimSpec
from drumroll.errors import RunError


class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), on every parameter, matrix or not.

    `pieces`: name -> float32 tensor of any shape, updated in place; may be empty where a rank owns nothing of a parameter.
    """

    def __init__(self, pieces: Mapping[str, torch.Tensor], spec: OptimSpec) -> None:
        for name, piece in pieces.items():
            if piece.dtype is not torch.float32:
                raise RunError(f"{name}: the optimizer steps {piece.dtype}, expected float32: small updates would round away")
        self.steps = 0
        self.exp_avg = {name: torch.zeros_like(piece) for name, piece in pieces.items()}
        self.exp_avg_sq = {name: torch.zeros_like(piece) for name, piece in pieces.items()}
        self._spec = spec
        self._pieces = dict(pieces)
        self._owned = [name for name, piece in pieces.items() if piece.numel() > 0]
        self._step_tensors = [torch.zeros((), dtype=torch.float32, device=pieces[name].device) for name in self._owned]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        """One update. `gradients`: name -> float32 tensor shaped as the piece."""
        self.steps += 1
        if not self._owned:
            return
        adamw(
            [self._pieces[name] for name in self._owned],
            [gradients[name] for name in self._owned],
            [self.exp_avg[name] for name in self._owned],
            [self.exp_avg_sq[name] for name in self._owned],
            [],
            self._step_tensors,
            fused=True,
            amsgrad=False,
            beta1=self._spec.betas[0],
            beta2=self._spec.betas[1],
            lr=lr,
            weight_decay=self._spec.weight_decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates done, after the moments have been restored in place."""
        self.steps = steps
        for tensor in self._step_tensors:
            tensor.fill_(float(steps))
