"""Prompts that several samples of a micro-batch begin with, computed once.

[Note: shared prompts] The samples of a group have their prompt in common, and with causal attention what a model makes of a prompt does
not depend on what follows. So everything that works token by token (embedding, projections, norms, MLPs) sees each prompt once: one row of
the U tokens that differ. Only attention sees right-padded rows of whole samples: it spreads queries, keys and values over them and takes
back the outputs of the U tokens. A prompt's gradient is the sum of what its samples give; it is added up in a fixed order, so that a step
can be repeated bit by bit.

Axis suffixes: U tokens that differ, B rows, L tokens of a row, P tokens of a prompt, K heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drumroll.errors import RunError

_NAME = "drumroll_shared_prompts"  # of the attention, among those of transformers
_BASE = "sdpa"  # the attention that it wraps
_OWN_MASKS = ("doge",)  # models that build on the body's mask in their attention: they need it, and it is of whole samples
_WORTH = 0.9  # share of the rows' tokens that may be left to compute, for the copies around attention to pay


@dataclass(slots=True)
class Shared:
    """Where the U tokens are in rows of whole samples."""

    rows: int
    place_U: torch.Tensor  # int64: of each token, into the flattened [B * L]
    token_BL: torch.Tensor  # int64 [B * L]: which token is at a place; for padding, the row's last one
    copies: list[tuple[torch.Tensor, int, int]]  # rows [M] that repeat a prompt, its first token among the U, its length P
    used: int = field(default=0)  # attention layers that have asked


def supports(hf: PreTrainedModel, attention: str) -> bool:
    """Whether a model's attention can be told: it is called through transformers' interface, and every layer looks at all before it."""
    fields = hf.config.get_text_config().to_dict()
    if fields.get("model_type") in _OWN_MASKS:
        return False
    whole = all(kind == "full_attention" for kind in fields.get("layer_types") or ()) and fields.get("sliding_window") is None
    return attention == _BASE and whole and bool(hf._supports_attention_backend)


def install(hf: PreTrainedModel) -> None:
    """Let a model's attention look for `shared=Shared(...)` among the arguments of its forward; without it, it is what it was.

    Compiled blocks call it between their graphs: it loops over what is shared, and would be compiled anew for every number of prompts.
    """
    AttentionInterface.register(_NAME, torch.compiler.disable(_attention))
    AttentionMaskInterface.register(_NAME, _no_mask)
    hf.set_attn_implementation(_NAME)


def find(lengths: np.ndarray, prompts: Sequence[tuple[int, int]], device: torch.device) -> Shared | None:
    """How samples of `lengths` inputs, at least one of them more than none, share `prompts`; None where it would not pay."""
    prompt, owner = np.array(prompts, dtype=np.int64).T
    samples = np.arange(len(lengths))
    begins = np.where(owner == samples, 0, prompt)  # the first token of a sample that is its own
    counts = lengths - begins
    length = int(lengths.max())
    if counts.sum() > _WORTH * len(lengths) * length:
        return None
    start = np.cumsum(counts) - counts  # of a sample's own tokens among the U
    columns = np.arange(length)
    column_BL = np.clip(np.minimum(columns, lengths[:, None] - 1), 0, None)
    own_BL = column_BL >= begins[:, None]
    token_BL = np.where(own_BL, (start - begins)[:, None], start[owner][:, None]) + column_BL
    token_BL[lengths == 0] = 0
    place_U = np.flatnonzero((columns >= begins[:, None]) & (columns < lengths[:, None]))
    sharing = [(first, np.flatnonzero((owner == first) & (samples != first))) for first in np.unique(owner[owner != samples])]
    return Shared(
        rows=len(lengths),
        place_U=torch.from_numpy(place_U).to(device),
        token_BL=torch.from_numpy(token_BL.flatten()).to(device),
        copies=[(torch.from_numpy(rows).to(device), int(start[first]), int(prompt[first])) for first, rows in sharing],
    )


def spread(tokens: torch.Tensor, shared: Shared) -> torch.Tensor:
    """[U, ...] -> [B * L, ...], each token at every place that it has. Differentiable; gradients of padding are not looked at."""
    placed: torch.Tensor = _Spread.apply(tokens, shared)  # type: ignore[no-untyped-call]
    return placed


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, shared: Shared) -> torch.Tensor:
        ctx.shared = shared
        return tokens.index_select(0, shared.token_BL)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        shared: Shared = ctx.shared
        of_rows = grads[0].unflatten(0, (shared.rows, -1))
        total = grads[0].index_select(0, shared.place_U)
        for rows, first, length in shared.copies:
            total[first : first + length] += of_rows[:, :length].index_select(0, rows).sum(0)
        return total, None


def _attention(
    module: torch.nn.Module,
    query_1KUD: torch.Tensor,
    key_1KUD: torch.Tensor,
    value_1KUD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared: Shared | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of rows, of which only the U tokens that differ are given and asked for: [1, U, K, D]."""
    if shared is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query_1KUD, key_1KUD, value_1KUD, attention_mask, **others)
        return output
    if attention_mask is not None:  # of the U tokens in a row: it is not the rows'
        raise RunError(f"{type(module).__name__} makes a mask of its own: set model.share_prompts=false")
    shared.used += 1
    query, key, value = (
        spread(tokens[0].transpose(0, 1), shared).unflatten(0, (shared.rows, -1)).transpose(1, 2)
        for tokens in (query_1KUD, key_1KUD, value_1KUD)
    )
    made_BLKD, _ = sdpa_attention_forward(module, query, key, value, None, **others)
    return made_BLKD.flatten(0, 1).index_select(0, shared.place_U)[None], None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Rows are causal, and their padding comes after every real token."""
