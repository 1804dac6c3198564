"""A key-value cache of slots: one static tensor a layer, a position of its own for every row.

Axis suffixes in shapes: B rows in flight, S slots, T tokens of a prefill, L cached tokens, H heads (of keys), D head size.

[Note: slot cache] transformers' caches have one position for all rows. Here a row is a slot of `[S, H, L, D]` tensors and has its own
position, so that rows can end and be replaced while others go on. A model's forward finds the cache through its attention layers:
`SlotLayer.update` is called by each of them with the new keys and values, and the plan of the pass under way says where those go.
A prefill writes them into their slots and attends over them alone (a prompt has no past); a decode step writes one token a row at the
row's position and attends over the first L entries of the first B slots, where a mask hides what lies beyond a row's own position.
What is hidden must still be finite (0 x NaN is NaN): slots are zeroed when allocated. On a CPU, L is the cache's length: products over
the whole of a tensor take less than half the time of products over a part of every row. Elsewhere it is that of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drumroll.models import attention

_GROWTH = 16  # tokens: cache lengths are multiples of it


@dataclass(slots=True, frozen=True)
class Prefill:
    """Row `source[i]` of the new keys and values goes into slot `slots[i]`, from position 0."""

    slots: torch.Tensor  # int64 [N]
    source: torch.Tensor  # int64 [N]


@dataclass(slots=True, frozen=True)
class Decode:
    """Row b of the batch is slot b; its new token is at `positions[b]`; no row is longer than `length`."""

    rows: torch.Tensor  # int64 [B], 0 .. B-1
    positions: torch.Tensor  # int64 [B]
    length: int


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer, `[S, H, L, D]` each, see [Note: slot cache]."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeroed slots with the shapes of the first keys and values seen."""
        self.keys = key_states.new_zeros((self.cache.slots, key_states.shape[1], self.cache.length, key_states.shape[3]))
        self.values = value_states.new_zeros((self.cache.slots, value_states.shape[1], self.cache.length, value_states.shape[3]))
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [B, H, T, D] where the plan says; returns those to attend over."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, plan = self.keys, self.values, self.cache.plan
        assert keys is not None and values is not None
        if isinstance(plan, Prefill):
            tokens = key_states.shape[2]
            keys[plan.slots, :, :tokens] = key_states[plan.source]
            values[plan.slots, :, :tokens] = value_states[plan.source]
            return key_states, value_states
        keys[plan.rows, :, plan.positions] = key_states[:, :, 0]
        values[plan.rows, :, plan.positions] = value_states[:, :, 0]
        rows = key_states.shape[0]
        return keys[:rows, :, : plan.length], values[:rows, :, : plan.length]

    def resize(self, slots: int, length: int) -> None:
        """Grow to `[slots, H, length, D]`, keeping what is stored."""
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = (_grown(old, slots, length) for old in (self.keys, self.values))

    def stored(self) -> list[torch.Tensor]:
        return [states for states in (self.keys, self.values) if states is not None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if isinstance(self.cache.plan, Prefill) else self.cache.plan.length), 0

    def get_seq_length(self) -> int:
        return 0 if isinstance(self.cache.plan, Prefill) else self.cache.plan.length - 1

    def get_max_length(self) -> int:
        return self.cache.length


class SlotCache(Cache):
    """The cache of a model with `layers` attention layers; it starts empty and grows to what `reserve` asks for."""

    def __init__(self, layers: int) -> None:
        self.slots = 0
        self.length = 0
        self.plan: Prefill | Decode = Prefill(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        self.slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` rows of `length` tokens; layers grow one after the other, so the peak is one layer above the result."""
        if slots <= self.slots and length <= self.length:
            return
        self.slots = max(slots, self.slots)
        if length > self.length:
            self.length = _longer(self.length, length)
        for layer in self.slot_layers:
            layer.resize(self.slots, self.length)

    def copy(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots `source` to slots `target`, int64 [N] each; the sets may overlap."""
        for layer in self.slot_layers:
            for states in layer.stored():
                states[target, :, :length] = states[source, :, :length]

    def release(self) -> None:
        """Drop everything; the next `reserve` allocates again."""
        self.slots = self.length = 0
        for layer in self.slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that holds cached keys or values."""
        return [states for layer in self.slot_layers for states in layer.stored()]


def length_reached(prompt: int, length: int) -> int:
    """Tokens of a slot after rows have grown from `prompt` to `length`, one by one."""
    reached = _longer(0, prompt)
    while reached <= length:
        reached = _longer(reached, reached + 1)
    return reached


def _longer(now: int, wanted: int) -> int:
    return -(-max(wanted, now + now // 4) // _GROWTH) * _GROWTH


def _grown(old: torch.Tensor, slots: int, length: int) -> torch.Tensor:
    new = old.new_empty((slots, old.shape[1], length, old.shape[3]))
    new[: old.shape[0], :, : old.shape[2]] = old
    new[: old.shape[0], :, old.shape[2] :] = 0
    new[old.shape[0] :] = 0
    return new


def decode_mask(positions_B: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, L]: 0 up to and including a row's own position, -inf beyond."""
    beyond = torch.arange(length, device=positions_B.device) > positions_B[:, None]
    return torch.zeros(beyond.shape, dtype=dtype, device=positions_B.device).masked_fill_(beyond, float("-inf"))[:, None, None]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention, except that a decode step does not repeat the keys of grouped heads.

    Query heads that share a key head become rows of one query block: query [B, H x G, 1, D] is read as [B, H, G, D] beside keys and values
    [B, H, L, D], so the cache is read in place. Returns [B, T, H x G, D].
    """
    rows, query_heads, tokens, size = query.shape
    if tokens > 1 or attention_mask is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    heads = key.shape[1]
    grouped = query.reshape(rows, heads, query_heads // heads, size)
    if query.device.type != "cpu":
        out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    else:  # one query a head: two batched products beat the CPU's flash kernel, which is made for many
        weights = torch.matmul(grouped * (size**-0.5 if scaling is None else scaling), key.transpose(2, 3)).add_(attention_mask)
        out = torch.matmul(weights.softmax(-1, dtype=torch.float32).to(value.dtype), value)
    return out.reshape(rows, 1, query_heads, value.shape[3]), None


SLOT_ATTENTION = attention.register("drumroll_slots", slot_attention)
