"""How a ragged micro-batch is laid out for the kernels: right-padded rows, or one packed row. Private to `models/`.

The last token of a sample is never an input, only a target. Both layouts are causal and pass no attention mask: in rows, padding comes
after every real token; in a packed row, position ids that start again at 0 are what transformers isolates samples by, provided that there
is no mask and no cache. A packed row may be cut into slices of equal length, one a rank.

Axis suffixes: B rows, L tokens of a row, N targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from drumroll.models import prompts
from drumroll.types import MicroBatch

Layout = Literal["rows", "packed"]


@dataclass(slots=True, frozen=True)
class Laid:
    """What the model's body reads, and where the hidden states that predict the targets are."""

    input_ids_BL: torch.Tensor  # int64
    position_ids_BL: torch.Tensor  # int64 [1, L] for rows (the same for all), [1, L] for a packed row
    index_N: torch.Tensor  # int64: into the flattened [B * L] hidden states
    targets_N: torch.Tensor  # int64: token ids
    shared: prompts.Shared | None = None  # the inputs are then one row of tokens that differ, and `index_N` is into what they are spread to
    fill_in: bool = False  # one dummy target is computed and none kept


@dataclass(slots=True, frozen=True)
class Slice:
    """One rank's part of a packed row that several ranks share."""

    laid: Laid  # indices count from the slice's first token
    lengths: list[int]  # of every sequence of the whole row; the last one may be padding
    targets: list[int]  # how many targets each rank's slice predicts, in the order of ranks


def choose(layout: str, attention: str) -> Layout:
    """`auto` packs only where a varlen kernel makes it cost the sum of squared lengths; elsewhere a packed row costs its length squared."""
    if layout == "auto":
        return "packed" if "flash" in attention else "rows"
    if layout in ("rows", "packed"):
        return "rows" if layout == "rows" else "packed"
    raise ValueError(f"layout: expected auto, rows or packed, got {layout!r}")


def lay_out(micro: MicroBatch, layout: Layout, share_prompts: bool = False) -> Laid:
    """Rows are in the order of the samples; padding repeats the row's own last token, which no real token can see.

    `share_prompts`: in rows, a prompt that several samples have is read once, where that pays. See [Note: shared prompts].
    """
    n_targets = len(micro.target_positions)
    if n_targets == 0:
        return _fill_in(micro.token_ids.device)
    lengths = np.asarray(micro.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    if layout == "rows":
        length = max(1, int(lengths.max()) - 1)
        columns = np.arange(length)
        source = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        positions, row_starts = columns[None], np.arange(len(lengths)) * length
    else:
        inputs = lengths - 1
        positions = np.concatenate([np.arange(count) for count in inputs])[None]
        row_starts = np.cumsum(inputs) - inputs
        source = positions + np.repeat(starts, inputs)[None]
    device = micro.token_ids.device
    shift = torch.from_numpy(row_starts - starts - 1).to(device)  # from a target in the flat batch to the place that predicts it
    laid = Laid(
        input_ids_BL=micro.token_ids[torch.from_numpy(source).to(device)],
        position_ids_BL=torch.from_numpy(positions).to(device),
        index_N=micro.target_positions + torch.repeat_interleave(shift, micro.target_lengths, output_size=n_targets),
        targets_N=micro.token_ids[micro.target_positions],
    )
    if not share_prompts or layout != "rows" or micro.prompts is None:
        return laid
    shared = prompts.find(lengths - 1, micro.prompts, device)
    if shared is None:
        return laid
    return replace(
        laid,
        input_ids_BL=laid.input_ids_BL.flatten()[shared.place_U][None],
        position_ids_BL=(shared.place_U % laid.input_ids_BL.shape[1])[None],
        shared=shared,
    )


def owners(micro: MicroBatch, layout: Layout) -> torch.Tensor:
    """Which sample each input of what `lay_out` makes belongs to: int64 [B * L], the number of samples for padding and for a dummy."""
    samples = len(micro.lengths)
    if len(micro.target_positions) == 0:
        return torch.full((1,), samples, device=micro.token_ids.device)
    inputs = np.asarray(micro.lengths, dtype=np.int64) - 1
    if layout == "packed":
        owner = np.repeat(np.arange(samples), inputs)
    else:
        columns = np.arange(max(1, int(inputs.max())))
        owner = np.where(columns < inputs[:, None], np.arange(samples)[:, None], samples).flatten()
    return torch.from_numpy(owner).to(micro.token_ids.device)


def _fill_in(device: torch.device) -> Laid:
    """One dummy token and target, so that a rank without work still touches every parameter and its collectives match."""
    zeros = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Laid(zeros, zeros, zeros[0], zeros[0], fill_in=True)


def cut(micro: MicroBatch, rank: int, ranks: int, device: torch.device) -> Slice:
    """The slice of `rank` of the packed row, which is filled up to a multiple of `ranks` tokens: no rank is without one.

    A sample may lie in several slices. Without a target in it the row is nothing but filling, and no slice predicts anything.
    """
    if len(micro.target_positions):
        laid, lengths = lay_out(micro, "packed"), [length - 1 for length in micro.lengths if length > 1]
    else:
        nothing = micro.token_ids[:0]
        laid, lengths = Laid(nothing[None], nothing[None], nothing, nothing), []
    tokens = sum(lengths)
    slice_tokens = max(1, -(-tokens // ranks))
    if filling := ranks * slice_tokens - tokens:
        lengths = [*lengths, filling]
    owner_N = laid.index_N // slice_tokens
    mine = owner_N == rank
    own = slice(rank * slice_tokens, (rank + 1) * slice_tokens)
    part = Laid(
        input_ids_BL=torch.nn.functional.pad(laid.input_ids_BL, (0, filling))[:, own].to(device),
        position_ids_BL=torch.cat([laid.position_ids_BL, torch.arange(filling)[None]], dim=1)[:, own].to(device),
        index_N=(laid.index_N[mine] - own.start).to(device),
        targets_N=laid.targets_N[mine].to(device),
    )
    return Slice(part, lengths, torch.bincount(owner_N, minlength=ranks).tolist())
