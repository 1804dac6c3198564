"""How a transformer block computes: cast, compiled, tiled, and with which of its activations kept for backward.

[Note: master parameters] Stored parameters are fp32. With a lower compute dtype they are cast as a whole before use, and gradients flow
back through the cast into fp32. A backend whose placement does that itself (a mixed-precision policy) leaves `Scorer.cast_parameters` off.
Each block is cast inside its own forward, and inside its activation checkpoint, because a recomputation happens in backward, long after
the scorer's forward has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drumroll.backends.base import Checkpointing
from drumroll.errors import UserError

# What selective checkpointing keeps: results that cost a matmul or an attention to make again. Everything else is recomputed.
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",  # of experts
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)


_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Casting(Protocol):
    """What a block asks its scorer when it computes, since the placement decides it only after the block was made."""

    cast_parameters: bool
    compute_dtype: torch.dtype


def block_forward(scorer: Casting, block: nn.Module, checkpointing: Checkpointing, compiled: bool) -> Callable[..., Any]:
    """The forward of a block, cast, compiled and checkpointed as the scorer says. See [Note: master parameters]."""
    plain = block.forward
    holder = _Holder(block, plain)

    def compute(*args: Any, **kwargs: Any) -> Any:
        if not scorer.cast_parameters or scorer.compute_dtype == torch.float32:
            return plain(*args, **kwargs)
        cast = {name: parameter.to(scorer.compute_dtype) for name, parameter in holder.named_parameters()}
        return functional_call(holder, cast, args, kwargs)

    run: Callable[..., Any] = torch.compile(compute, dynamic=True) if compiled else compute

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or checkpointing == "none":
            return run(*args, **kwargs)
        if checkpointing == "selective":
            return _recomputed(run, *args, context_fn=_selective, **kwargs)
        if checkpointing == "offload":
            with save_on_cpu(pin_memory=args[0].is_cuda):  # catches what the checkpoint saves: the block's input
                return _recomputed(run, *args, **kwargs)
        return _recomputed(run, *args, **kwargs)

    return forward


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    made: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = create_selective_checkpoint_contexts(policy)
    return made


def tile_mlp(scorer: Casting, block: nn.Module, tokens: int) -> None:
    """Let the block's `mlp` work on at most `tokens` tokens at a time: its wide activations are made again in backward, tile by tile.

    Raises UserError for a block without a child of that name.
    """
    children = dict(block.named_children())
    if "mlp" not in children:
        raise UserError(f"model.tile_mlp: {type(block).__name__} has no child `mlp`, only {', '.join(children)}; set model.tile_mlp=0")
    mlp = children["mlp"]
    plain = mlp.forward
    holder = _Holder(mlp, plain)

    def tile(hidden_1TH: torch.Tensor) -> torch.Tensor:
        if scorer.cast_parameters and scorer.compute_dtype != torch.float32:
            cast = dict(holder.named_parameters())  # when a tile is made again, the block has its own parameters back
            made: torch.Tensor = _recomputed(functional_call, holder, cast, (hidden_1TH,))
        else:
            made = _recomputed(plain, hidden_1TH)
        return made

    def forward(hidden_BLH: torch.Tensor) -> torch.Tensor:
        flat_TH = hidden_BLH.flatten(0, -2)
        if len(flat_TH) <= tokens:
            whole: torch.Tensor = plain(hidden_BLH)
            return whole
        run = tile if torch.is_grad_enabled() else plain
        return torch.cat([run(tile_TH[None])[0] for tile_TH in flat_TH.split(tokens)]).view_as(hidden_BLH)

    mlp.forward = forward


class _Holder(nn.Module):
    """A module seen through its original forward, so that `functional_call` does not come back to the wrapped one."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.plain = plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)
