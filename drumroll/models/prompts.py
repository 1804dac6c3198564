"""Prompts that several samples of a micro-batch begin with, computed once.

[Note: shared prompts] The samples of a group have their prompt in common, and with causal attention what a model makes of a prompt does
not depend on what follows. So everything that works token by token (embedding, projections, norms, MLPs) sees each prompt once: one row of
the U tokens that differ. Only attention sees right-padded rows of whole samples: it spreads queries, keys and values over them and takes
back the outputs of the U tokens. A prompt's gradient is the sum of what its samples give; it is added up in a fixed order, so that a step
can be repeated bit by bit. All of it is tensors of any size, so that a block is compiled once for any number of prompts and samples.

Axis suffixes: U tokens that differ, B rows, L tokens of a row, Q tokens of prompts that are repeated, C copies of a prompt beside the
first, K heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drumroll.errors import RunError, UserError
from drumroll.models import attention as attentions

_BASE = "sdpa"  # the attention that this one wraps
_OWN_MASKS = ("doge",)  # models that build on the body's mask in their attention: they need it, and it is of whole samples
_WORTH = 0.9  # share of the rows' tokens that may be left to compute, for the copies around attention to pay
_IDLE = 2  # tokens that get nothing, so that torch.compile never meets a length of 0 or 1, for which it would make a graph of its own
_TRIED = 5  # tokens of a trial


@dataclass(slots=True, frozen=True)
class Shared:
    """Where the U tokens are in rows of whole samples: int64 all but one."""

    token_BL: torch.Tensor  # which token is at a place; for padding, the row's last one
    place_U: torch.Tensor  # of each token, into the flattened [B * L]
    token_Q: torch.Tensor  # each token that is at several places, once; before them some that are not
    copy_CQ: torch.Tensor  # its other places; 0 where a prompt has fewer copies than the most
    real_CQ: torch.Tensor  # bool: which of these are


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
    copies = [(first, np.flatnonzero((owner == first) & (samples != first))) for first in np.unique(owner[owner != samples])]
    most = max((len(rows) for _, rows in copies), default=1)
    token_Q = [start[first] + columns[: prompt[first]] for first, _ in copies]
    copy_CQ = [np.pad(rows[:, None] * length + columns[: prompt[first]], ((0, most - len(rows)), (0, 0))) for first, rows in copies]
    real_CQ = [np.broadcast_to(np.arange(most)[:, None] < len(rows), (most, prompt[first])) for first, rows in copies]
    return Shared(
        token_BL=torch.from_numpy(token_BL).to(device),
        place_U=torch.from_numpy(place_U).to(device),
        token_Q=torch.from_numpy(np.concatenate([np.zeros(_IDLE, np.int64), *token_Q])).to(device),
        copy_CQ=torch.from_numpy(np.concatenate([np.zeros((most, _IDLE), np.int64), *copy_CQ], axis=1)).to(device),
        real_CQ=torch.from_numpy(np.concatenate([np.zeros((most, _IDLE), bool), *real_CQ], axis=1)).to(device),
    )


def spread(tokens: torch.Tensor, shared: Shared) -> torch.Tensor:
    """[U, ...] -> [B, L, ...], each token at every place that it has. Differentiable; gradients of padding are not looked at."""
    placed: torch.Tensor = _Spread.apply(  # type: ignore[no-untyped-call]
        tokens, shared.token_BL, shared.place_U, shared.token_Q, shared.copy_CQ, shared.real_CQ
    )
    return placed


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, token_BL: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*where)
        placed: torch.Tensor = tokens.index_select(0, token_BL.flatten()).unflatten(0, token_BL.shape)
        return placed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        place_U, token_Q, copy_CQ, real_CQ = ctx.saved_tensors
        placed = grads[0].flatten(0, 1)
        total = placed.index_select(0, place_U)
        of_copies = placed.index_select(0, copy_CQ.flatten()).unflatten(0, copy_CQ.shape)
        of_copies.mul_(real_CQ.view(*real_CQ.shape, *[1] * (placed.ndim - 1)))
        return total.index_add_(0, token_Q, of_copies.sum(0)), None, None, None, None, None  # one sum a token: in no order


def _attention(
    module: nn.Module,
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
    query, key, value = (spread(tokens[0].transpose(0, 1), shared).transpose(1, 2) for tokens in (query_1KUD, key_1KUD, value_1KUD))
    made_BLKD, _ = sdpa_attention_forward(module, query, key, value, None, **others)
    return made_BLKD.flatten(0, 1).index_select(0, shared.place_U)[None], None


def supports(hf: PreTrainedModel, attention: str) -> bool:
    """Whether a model says of itself that attention alone looks at other tokens, in every layer at all before; and is called by name."""
    fields = hf.config.get_text_config().to_dict()
    if fields.get("model_type") in _OWN_MASKS or any(isinstance(module, nn.Conv1d) for module in hf.modules()):
        return False
    whole = all(kind == "full_attention" for kind in fields.get("layer_types") or ()) and not fields.get("sliding_window")
    return attention == _BASE and whole and bool(hf._supports_attention_backend)


def install(hf: PreTrainedModel, blocks: Sequence[nn.Module]) -> str:
    """Let a model's attention look for `shared=Shared(...)` among the arguments of its forward; without it, it is what it was.

    Where that could not work nothing is changed, and the reason returned. It is tried before there are weights, on shapes alone: every
    block has to have called an attention, once or more often, told what is shared, on the tokens at hand, without a mask.
    """
    trial = _Trial()
    try:
        attentions.choose(hf, _TRIAL)
        with torch.no_grad():
            _run_without_values(hf, trial)
        of_all = _all_of(blocks, trial.modules)
        reason = "" if of_all else "expected every block, and nothing else, to call its attention through transformers' interface"
    except (UserError, _Unsuited) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - fault boundary: the model's own code, which may ask for values that are not there
        reason = f"it cannot be tried without values: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    attentions.choose(hf, _NAME if not reason else _BASE)
    return reason


@dataclass(slots=True)
class _Trial:
    modules: list[nn.Module] = field(default_factory=list)  # that have called their attention


class _Unsuited(Exception):
    """What a trial found."""


def _run_without_values(hf: PreTrainedModel, trial: _Trial) -> None:
    """One pass of a body over meta tensors; in bfloat16, the one dtype of which grouped matmuls of experts know their shapes.

    From embeddings on: some models (GPT-2 with a `pad_token_id`) look at the values of ids, to warn of padding.
    """
    body, width = hf.base_model, hf.get_input_embeddings().get_parameter("weight").shape[1]
    tensors = {name: torch.empty_like(p, dtype=torch.bfloat16, device="meta") for name, p in body.named_parameters()}
    tensors |= {name: buffer.to("meta") for name, buffer in body.named_buffers()}
    embedded_1UH = torch.empty(1, _TRIED, width, dtype=torch.bfloat16, device="meta")
    positions_1U = torch.zeros(1, _TRIED, dtype=torch.int64, device="meta")
    inputs = {"inputs_embeds": embedded_1UH, "position_ids": positions_1U, "attention_mask": None, "use_cache": False, "shared": trial}
    functional_call(body, tensors, (), inputs)


def _all_of(blocks: Sequence[nn.Module], modules: Sequence[nn.Module]) -> bool:
    """Whether each block has one of the modules, and nothing else has any."""
    inside = [set(block.modules()) for block in blocks]
    return all(of_block & set(modules) for of_block in inside) and set(modules) <= set().union(*inside)


def _try(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    shared: _Trial | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """In place of an attention: notes who called it, and refuses what sharing could not give it."""
    name = type(module).__name__
    if shared is None:
        raise _Unsuited(f"{name} does not pass its arguments on to its attention")
    if attention_mask is not None:
        raise _Unsuited(f"{name} makes a mask of its own")
    if {(len(tensor), tensor.shape[2]) for tensor in (query, key, value)} != {(1, _TRIED)}:
        raise _Unsuited(f"{name} attends over other tokens than its block's")
    shared.modules.append(module)
    return value.new_empty(1, _TRIED, query.shape[1], value.shape[3]), None


_NAME = attentions.register("drumroll_shared_prompts", _attention)
_TRIAL = attentions.register("drumroll_shared_prompts_trial", _try)
