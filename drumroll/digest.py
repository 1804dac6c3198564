"""An additive digest of a tensor, so that shards, ranks and slices of fused parameters add up and nothing is gathered for it.

The digest of a tensor is the sum modulo 2^64 over its elements of (bits + constant) * key(global element index): `bits` is the element's
bit pattern as a signed integer and `key` an odd 64-bit number made by splitmix64 (Steele, Lea & Flood 2014), a multilinear hash (Carter &
Wegman 1979) with fixed keys. A change of one element always shows, since an odd key is invertible modulo 2^64; a permutation, another
length or any other change shows except with a chance of about 2^-32. It guards against mistakes, not against an adversary. Cost: about
four memory copies.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 1 << 16  # key(i) = _low_keys[i mod _BLOCK] * _high_key(i // _BLOCK): part of the definition, not a tuning knob
_ROWS_ON_ACCELERATOR = 64  # blocks at a time where launches are dear; on a CPU one block stays in the cache
_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # element size in bytes -> integer lane


def digest(tensor: torch.Tensor, start: int = 0) -> int:
    """Digest of a contiguous run of a flattened tensor that begins at element `start` of the full tensor.

    Any real dtype and shape; the digests of disjoint runs add up modulo 2^64 (see `combine`) to the digest of the whole. An element of
    eight bytes counts as two lanes of four, so that sign bits cannot cancel.
    """
    flat = tensor.detach().reshape(-1)
    lanes = flat.view(_LANES[flat.element_size()])
    start *= flat.element_size() // lanes.element_size()
    rows = 1 if lanes.device.type == "cpu" else _ROWS_ON_ACCELERATOR
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    position, end = 0, lanes.numel()
    while position < end:
        high, low = divmod(start + position, _BLOCK)
        whole = min(rows, (end - position) // _BLOCK) if low == 0 else 0
        size = whole * _BLOCK if whole else min(_BLOCK - low, end - position)
        piece = lanes[position : position + size].view(max(1, whole), -1)
        total += _blocks(piece, high, low)
        position += size
    return int(total.item()) & _MASK


def combine(*digests: int) -> int:
    """Digest of the whole from the digests of its disjoint runs."""
    return sum(digests) & _MASK


def _blocks(piece_RL: torch.Tensor, high: int, low: int) -> torch.Tensor:
    """Sum over R rows, row r being elements `low`.. of block `high + r`; int64 arithmetic wraps as modulo 2^64 does."""
    rows, length = piece_RL.shape
    keys_L = _low_keys(piece_RL.device)[low : low + length]
    sums_R = (piece_RL.to(torch.int64, copy=True).add_(_signed(_GOLDEN)).mul_(keys_L)).sum(dim=1)
    high_R = torch.tensor([_high_key(high + row) for row in range(rows)], dtype=torch.int64, device=piece_RL.device)
    return (sums_R * high_R).sum()


@lru_cache(maxsize=8)
def _low_keys(device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(_splitmix64(index) | 1) for index in range(_BLOCK)], dtype=torch.int64, device=device)


def _high_key(block: int) -> int:
    return _signed(_splitmix64(block + (1 << 40)) | 1)


def _splitmix64(index: int) -> int:
    z = ((index + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
