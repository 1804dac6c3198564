"""Ulysses sequence parallelism (Jacobs et al. 2023): the ranks of a group compute their micro-batches together, each a slice of the tokens.

[Note: ulysses] Every rank brings its own micro-batch, as it would alone, and gets the outputs of its own targets; in between
    - `gather`: the group's micro-batches become one packed row, of which each rank takes a slice of equal length (`layout.cut`);
    - embedding, norms, MLPs and head see the slice only, so that what they keep for backward is one over the ranks;
    - attention changes slices of tokens for shares of heads and back (`exchange`), and runs sequence by sequence in between;
    - `Group.bring_home`: outputs go from the rank that made them to the rank whose targets they are.
So a loss sees whole sequences, each on one rank, and losses, statistics and gradients add up over ranks as they do without a group.
Gradients flow back through the same exchanges. All of it is collective: every rank makes the same calls, one without a sample too.

Axis suffixes: P ranks of the group, C tokens of a slice, T = P * C tokens of the row, K heads, h heads of one rank, D width of a head,
N targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from drumroll.errors import UserError
from drumroll.models import attention
from drumroll.models.exchange import exchange
from drumroll.types import MicroBatch

# What models pass to their attention beside its operands that changes nothing here: positions are in the operands, nothing is cached.
_IDLE = frozenset(
    ("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
)
# Rotary frequencies that depend on the longest position at hand: a slice does not know it.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


@dataclass(slots=True, frozen=True)
class Row:
    """The packed row that a group works on, as attention has to know it."""

    lengths: Sequence[int]  # of its sequences, padding included: they add up to T
    group: dist.ProcessGroup


def install(hf: PreTrainedModel, ranks: int) -> None:
    """Make a model's attention that of this file; its forward then needs `row=Row(...)` beside its other arguments.

    Raises UserError for a model that cannot be computed by slices over `ranks` ranks.
    """
    name, config = type(hf).__name__, hf.config.get_text_config()
    if config.num_attention_heads % ranks:
        raise UserError(
            f"sequence_ranks={ranks}: {name} has {config.num_attention_heads} attention heads, which {ranks} ranks cannot share evenly; "
            f"choose a divisor of {config.num_attention_heads}"
        )
    fields = config.to_dict()
    if fields.get("sliding_window") is not None:
        window = fields["sliding_window"]
        raise UserError(f"sequence_ranks={ranks}: {name} attends in windows (sliding_window={window}): not supported here")
    if found := [kind for kind in _rope_types(fields) if kind in _ROPE_BY_LENGTH]:
        raise UserError(f"sequence_ranks={ranks}: {name} has rope_type={found[0]}, a function of the longest sequence: not supported here")
    try:
        attention.choose(hf, _NAME)
    except UserError as error:
        raise UserError(f"sequence_ranks={ranks}: {error}") from error


def _rope_types(fields: dict[str, Any]) -> list[str]:
    """`rope_parameters` are those of all layers, or one section a kind of layer."""
    found: dict[str, Any] = fields.get("rope_parameters") or {}
    sections = [found, *(section for section in found.values() if isinstance(section, dict))]
    return [section["rope_type"] for section in sections if "rope_type" in section]


def _attention(
    module: torch.nn.Module,
    query_1KCD: torch.Tensor,
    key_1KCD: torch.Tensor,
    value_1KCD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    row: Row | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of the row: [1, C, K, D] of this rank's slice. Called by the blocks of transformers' models."""
    told = [name for name, value in others.items() if name not in _IDLE and value is not None]
    if told or dropout or attention_mask is not None:
        told += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
        raise UserError(f"sequence_ranks: {type(module).__name__} gives its attention {', '.join(told)}, which are not supported here")
    if row is None:
        raise UserError(f"sequence_ranks: {type(module).__name__} does not pass keyword arguments on to its attention: not supported here")
    ranks = dist.get_world_size(row.group)
    # Fewer heads of keys and values than ranks: some ranks need the same one. As many copies as make them divide, and no more.
    copies = math.lcm(key_1KCD.shape[1], ranks) // key_1KCD.shape[1]
    operands = (query_1KCD, key_1KCD.repeat_interleave(copies, dim=1), value_1KCD.repeat_interleave(copies, dim=1))
    queries_ThD, keys_ThD, values_ThD = _tokens_for_heads(operands, ranks, row.group)
    grouped = queries_ThD.shape[1] != keys_ThD.shape[1]
    outputs = []
    for sequence in zip(*(tensor.split(list(row.lengths)) for tensor in (queries_ThD, keys_ThD, values_ThD)), strict=True):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in sequence)
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(output[0].transpose(0, 1))
    return _heads_for_tokens(torch.cat(outputs), ranks, row.group)[None], None


def _tokens_for_heads(operands: Sequence[torch.Tensor], ranks: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[1, K, C, D] each, all heads of this rank's tokens -> [T, h, D] each, this rank's heads of all tokens. One exchange for all."""
    by_rank = [operand[0].unflatten(0, (ranks, -1)).transpose(1, 2) for operand in operands]  # [P, C, h, D]
    sent = torch.cat([tensor.flatten(2) for tensor in by_rank], dim=-1)
    got = exchange(sent, group).flatten(0, 1)
    parts = got.split([tensor.shape[2] * tensor.shape[3] for tensor in by_rank], dim=-1)
    return [part.unflatten(-1, tensor.shape[2:]) for part, tensor in zip(parts, by_rank, strict=True)]


def _heads_for_tokens(output_ThD: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[T, h, D], this rank's heads of all tokens -> [C, K, D], all heads of this rank's tokens."""
    got_PChD = exchange(output_ThD.unflatten(0, (ranks, -1)), group)
    return got_PChD.transpose(0, 1).flatten(1, 2)


@dataclass(slots=True, frozen=True)
class Gathered:
    """The micro-batches of a group's ranks as one."""

    micro: MicroBatch  # on the CPU; in the order of ranks; without per-target arrays, which only a loss needs
    targets: list[int]  # of each rank


def gather(micro: MicroBatch, group: dist.ProcessGroup) -> Gathered:
    """Bring the token ids and targets of every rank of the group to all. Collective."""
    device = micro.token_ids.device
    lengths = torch.tensor(micro.lengths, dtype=torch.int64, device=device)
    fields = (lengths, micro.target_lengths, micro.token_ids, micro.target_positions)
    sizes = _all_gather(torch.tensor([len(field) for field in fields], device=device), group).tolist()
    mine = torch.cat(fields)
    widest = max(sum(of_rank) for of_rank in sizes)
    everybodys = _all_gather(torch.nn.functional.pad(mine, (0, widest - len(mine))), group).cpu()
    by_rank = [row[: sum(of_rank)].split(of_rank) for row, of_rank in zip(everybodys, sizes, strict=True)]
    all_lengths, target_lengths, token_ids, positions = zip(*by_rank, strict=True)
    starts = accumulate((len(tokens) for tokens in token_ids), initial=0)
    joint = MicroBatch(
        token_ids=torch.cat(token_ids),
        lengths=torch.cat(all_lengths).tolist(),
        target_positions=torch.cat([where + start for where, start in zip(positions, starts, strict=False)]),
        target_lengths=torch.cat(target_lengths),
    )
    return Gathered(joint, [len(where) for where in positions])


def _all_gather(mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[P, ...] from [...]."""
    everybodys = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.all_gather(list(everybodys.unbind()), mine, group=group)
    return everybodys


def bring_home(values: torch.Tensor, made: Sequence[int], owned: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of `values`, one a target that this rank's slice predicts -> one a target that this rank owns. Differentiable. Collective.

    made, owned: how many of the row's targets, in its order, each rank's slice predicts, and how many each rank owns.
    """
    me = dist.get_rank(group)
    return exchange(values, group, overlaps(made, owned)[me], overlaps(owned, made)[me])


def overlaps(of: Sequence[int], by: Sequence[int]) -> list[list[int]]:
    """`[i][j]`: how much the i-th of consecutive runs of lengths `of` has in common with the j-th of lengths `by`."""
    first, second = ([0, *accumulate(runs)] for runs in (of, by))
    return [
        [max(0, min(first[i + 1], second[j + 1]) - max(first[i], second[j])) for j in range(len(by))] for i in range(len(of))
    ]


_NAME = attention.register("drumroll_ulysses", torch.compiler.disable(_attention))  # between the graphs of compiled blocks: it communicates
