"""Rows that change places between ranks, and whose gradients come back the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup, send: Sequence[int] = (), receive: Sequence[int] = ()) -> torch.Tensor:
    """Rows of `tensor` in turn to the ranks of the group, and those that they send here; without counts as many from each as to each."""
    got: torch.Tensor = _Exchange.apply(tensor, group, list(send), list(receive))  # type: ignore[no-untyped-call]
    return got


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.back = group, receive, send
        got = tensor.new_empty((sum(receive) if receive else len(tensor), *tensor.shape[1:]))
        dist.all_to_all_single(got, tensor.contiguous(), receive or None, send or None, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange(grads[0], *ctx.back), None, None, None


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """`tensor`, whose gradient will be multiplied by `factor`."""
    same: torch.Tensor = _ScaledGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return same


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] * ctx.factor, None
