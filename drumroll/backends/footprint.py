"""What a backend says about its use of memory and of the network, before anything runs: what `drumroll plan` computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from drumroll.models.scorer import Scorer

Unit = Sequence[nn.Parameter]  # parameters that are gathered together


@dataclass(slots=True, frozen=True, kw_only=True)
class Gathering:
    """How parameters that no rank holds whole become so, unit by unit, around the computation that needs them."""

    units: Callable[[Scorer], Sequence[Unit]]  # inner ones first; what is in none forms the root unit, gathered from forward to backward
    between: int  # ranks over which a unit lies between its forward and its backward; 0: it stays whole
    arrives_apart: bool  # a unit arrives in memory of its own, kept until the next one has arrived, and is laid out from there
    ahead_forward: int = 0  # units gathered before the computation reaches them
    ahead_backward: int = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Footprint:
    """How training state is divided over the ranks, and what is whole for a while.

    `parameter`, `gradient` and `optimizer` are the divisors of ZeRO's table of memory (Rajbhandari et al. 2020, arXiv 1910.02054, figure
    1): bytes a rank at rest are n (4 / parameter + 4 / gradient + k / optimizer) for n parameters in float32 and AdamW's k = 8, plus
    padding. What is reduced over fewer ranks than there are is all-reduced over the others.
    """

    parameter: int = 1  # ranks over which stored parameters are divided
    gradient: int = 1  # the same for gradients, once they are reduced
    optimizer: int = 1  # the same for optimizer state
    flat: bool = False  # a unit's parameters are cut as one, end to end; else each tensor by its rows (`backends/rows.py`)
    gathering: Gathering | None = None  # None: every rank holds all parameters, and casts them itself where it computes in a lower dtype
    every_micro: bool = True  # gradients are reduced after every micro-batch; else whole ones add up until the last
    gradients_stay: bool = False  # their memory is there between steps too
    bucket_bytes: int = 0  # whole gradients wait for their reduction in buckets of this size; 0: by unit, or in their own memory
    buckets: int = 0  # such buckets at a time
    reduce_itemsize: int = 4  # bytes a number in which gradients are reduced
    sequence: int = 1  # ranks that compute a micro-batch together, each a slice of every sequence
    experts: int = 1  # ranks that share the experts of every layer: an expert is divided over so many ranks fewer than other parameters
    offload: bool = False  # parameters, gradients and optimizer state at rest are in host memory
