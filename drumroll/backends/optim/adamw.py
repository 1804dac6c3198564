"""AdamW over plain local tensors.

The moments exist from the start, so that saved and restored state has the same names before the first step as after it, and so that
their memory is there to be measured. The arithmetic is torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim.adamw import adamw

from drumroll.backends.base import OptimSpec
from drumroll.backends.buckets import buckets
from drumroll.errors import RunError

_STREAM_BYTES = 64 << 20  # of moments on the device at a time, where they live in host memory


class AdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), on every parameter, matrix or not.

    With `spec.offload` the moments live in host memory (pinned, for a GPU) and pass through the device in buckets while it steps.
    """

    def __init__(self, pieces: Mapping[str, torch.Tensor], spec: OptimSpec) -> None:
        check_float32(pieces)
        self.steps = 0
        self._spec = spec
        self._pieces = dict(pieces)
        self._owned = [name for name, piece in pieces.items() if piece.numel() > 0]
        self._step_tensors = {name: torch.zeros((), dtype=torch.float32, device=pieces[name].device) for name in self._owned}
        self.exp_avg = {name: self._zeros(piece) for name, piece in pieces.items()}
        self.exp_avg_sq = {name: self._zeros(piece) for name, piece in pieces.items()}

    def _zeros(self, piece: torch.Tensor) -> torch.Tensor:
        if not self._spec.offload:
            return torch.zeros_like(piece)
        return torch.zeros(piece.shape, dtype=piece.dtype, device="cpu", pin_memory=piece.is_cuda)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], lr: float) -> None:
        self.steps += 1
        if not self._spec.offload:
            self._update(self._owned, gradients, self.exp_avg, self.exp_avg_sq, lr)
            return
        for names in buckets(self._owned, lambda name: 2 * self._pieces[name].nbytes, _STREAM_BYTES):
            exp_avg, exp_avg_sq = self._brought(self.exp_avg, names), self._brought(self.exp_avg_sq, names)
            self._update(names, gradients, exp_avg, exp_avg_sq, lr)
            torch._foreach_copy_([self.exp_avg[name] for name in names], list(exp_avg.values()))
            torch._foreach_copy_([self.exp_avg_sq[name] for name in names], list(exp_avg_sq.values()))

    def _brought(self, moments: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copies on the device of the pieces."""
        return {name: moments[name].to(self._pieces[name].device, copy=True) for name in names}

    def _update(
        self,
        names: Sequence[str],
        gradients: Mapping[str, torch.Tensor],
        exp_avg: Mapping[str, torch.Tensor],
        exp_avg_sq: Mapping[str, torch.Tensor],
        lr: float,
    ) -> None:
        if not names:
            return
        adamw(
            [self._pieces[name] for name in names],
            [gradients[name] for name in names],
            [exp_avg[name] for name in names],
            [exp_avg_sq[name] for name in names],
            [],
            [self._step_tensors[name] for name in names],
            fused=True,
            amsgrad=False,
            beta1=self._spec.betas[0],
            beta2=self._spec.betas[1],
            lr=lr,
            weight_decay=self._spec.weight_decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def shared(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def set_steps(self, steps: int) -> None:
        self.steps = steps
        for tensor in self._step_tensors.values():
            tensor.fill_(float(steps))


def check_float32(pieces: Mapping[str, torch.Tensor]) -> None:
    for name, piece in pieces.items():
        if piece.dtype is not torch.float32:
            raise RunError(f"{name}: the optimizer steps {piece.dtype}, expected float32: small updates would round away")
