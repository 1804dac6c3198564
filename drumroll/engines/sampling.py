"""Draw one token a row: the distribution, its filters, and random numbers that depend on identity alone.

Axis suffixes in shapes: B rows, V vocabulary.

[Note: randomness by identity] The uniform number that samples a token is a hash of (run seed, stream, group id, sample index, position
in the response) and of nothing else, so a sample does not depend on the batch it is decoded in, on the order of requests, or on which
rank or slot holds it. Inverse-CDF turns that one number into a token. The generator is splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014): `stream_key` is its state for one sample, `uniform` its n-th output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumroll.engines.base import SamplingParams
from drumroll.errors import UserError
from drumroll.types import Stream

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_STREAMS: dict[Stream, int] = {"train": 1, "eval": 2}
_BLOCK = 256  # entries of the vocabulary summed in float32 before float64 takes over
_CANDIDATES = 1024  # most likely tokens looked at before the whole vocabulary is sorted for top_p


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, stream: Stream, group_id: int, index: int) -> int:
    """State of the random stream of one sample, a signed 64-bit integer."""
    state = 0
    for part in (seed, _STREAMS[stream], group_id, index):
        state = _mix((state + _GAMMA + (part & _MASK)) & _MASK)
    return _signed(state)


def uniform(keys_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [B], from int64 stream keys and positions in the response, both [B]."""
    x = keys_B + (positions_B + 1) * _signed(_GAMMA)  # int64 arithmetic wraps, which is what the hash needs
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).to(torch.float64) * 2.0**-53


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: int64 `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def check(sampling: SamplingParams) -> None:
    """Raises UserError for a value out of range."""
    bounds = {
        "max_tokens": sampling.max_tokens >= 1,
        "temperature": sampling.temperature >= 0,
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "min_p": 0 <= sampling.min_p < 1,
    }
    for name, fine in bounds.items():
        if not fine:
            raise UserError(f"sampling.{name}: out of range: {sampling!r}")


@dataclass(slots=True)
class Distribution:
    """The sampling distributions of B rows, as tensors; `None` where no row uses the filter."""

    greedy: torch.Tensor | None  # bool [B, 1]
    temperature: torch.Tensor | None  # float32 [B, 1]; 1 for greedy rows
    top_k: torch.Tensor | None  # int64 [B, 1]
    top_p: torch.Tensor | None  # float32 [B, 1]
    min_p: torch.Tensor | None  # float32 [B, 1]
    widest: int  # largest top_k, the vocabulary where some row has none

    @staticmethod
    def of(rows: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Distribution:
        """The distributions of `rows`, in that order."""

        def column(values: list[float], off: float) -> torch.Tensor | None:
            return torch.tensor(values, device=device)[:, None] if any(v != off for v in values) else None

        return Distribution(
            greedy=column([r.temperature == 0 for r in rows], False),
            temperature=column([r.temperature or 1.0 for r in rows], 1.0),
            top_k=column([min(r.top_k or vocabulary, vocabulary) for r in rows], vocabulary),
            top_p=column([float(r.top_p) for r in rows], 1.0),
            min_p=column([float(r.min_p) for r in rows], 0.0),
            widest=max((min(r.top_k or vocabulary, vocabulary) for r in rows), default=vocabulary),
        )


def sample(logits_BV: torch.Tensor, uniform_B: torch.Tensor, distribution: Distribution) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob under the distribution it was drawn from: int64 [B], float32 [B].

    Logits (any float dtype) are divided by the temperature, cut to the top k, then to the smallest set of most likely tokens whose mass
    reaches top_p, then to tokens with at least min_p times the largest probability, and renormalised. Greedy rows take the most likely
    token, with its log-prob at temperature 1 and no filter.
    """
    plain_BV = logits_BV.float()
    scaled_BV = plain_BV if distribution.temperature is None else plain_BV / distribution.temperature
    if distribution.top_k is not None or distribution.top_p is not None or distribution.min_p is not None:
        scaled_BV = _filtered(scaled_BV, distribution)
    ids, logprobs = _draw(scaled_BV, uniform_B[:, None])
    if distribution.greedy is not None:
        best = plain_BV.argmax(-1, keepdim=True)
        likelihood = plain_BV.gather(-1, best) - torch.logsumexp(plain_BV, -1, keepdim=True)
        ids = torch.where(distribution.greedy, best, ids)
        logprobs = torch.where(distribution.greedy, likelihood, logprobs)
    return ids[:, 0], logprobs[:, 0]


def _filtered(logits_BV: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Logits with -inf where a filter excludes the token."""
    if distribution.top_k is not None or distribution.top_p is not None:
        logits_BV = _most_likely(logits_BV, distribution)
    if distribution.min_p is not None:
        floor_B1 = logits_BV.amax(-1, keepdim=True) + distribution.min_p.log()  # a ratio of probabilities is a difference of logits
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, float("-inf"))
    return logits_BV


def _most_likely(logits_BV: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Logits cut to the top k, then to top p of what is left. Sorting a whole vocabulary is slow: a few candidates are tried first."""
    for width in (min(_CANDIDATES, distribution.widest), distribution.widest):
        kept_BK, order_BK = logits_BV.topk(width)
        complete_B1 = torch.full_like(order_BK[:, :1], width == distribution.widest, dtype=torch.bool)
        log_total_B1 = logits_BV.logsumexp(-1, keepdim=True)
        if distribution.top_k is not None:
            kept_BK = kept_BK.masked_fill(torch.arange(width, device=kept_BK.device) >= distribution.top_k, float("-inf"))
            complete_B1 = complete_B1 | (distribution.top_k <= width)
            log_total_B1 = torch.where(distribution.top_k <= width, kept_BK.logsumexp(-1, keepdim=True), log_total_B1)
        if distribution.top_p is not None:
            probs_BK = (kept_BK - log_total_B1).exp().double()
            mass_BK = probs_BK.cumsum(-1)
            before_BK = mass_BK - probs_BK  # of the more likely tokens: the token that crosses top_p stays in
            kept_BK = kept_BK.masked_fill((before_BK >= distribution.top_p) & (distribution.top_p < 1), float("-inf"))
            complete_B1 = complete_B1 | ((mass_BK[:, -1:] >= distribution.top_p) & (distribution.top_p < 1))
        if width == distribution.widest or bool(complete_B1.all()):
            break
    return torch.full_like(logits_BV, float("-inf")).scatter_(-1, order_BK, kept_BK)


def _draw(logits_BV: torch.Tensor, uniform_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF: the first token whose cumulative weight exceeds `uniform` of the total, and its log-prob, both [B, 1].

    Tokens of weight 0 are never drawn. In two levels, because a float64 running sum over a large vocabulary would cost more than the rest
    of sampling: blocks are summed in float32; the running sums over the blocks, and inside the chosen block, are float64.
    """
    rows, vocabulary = logits_BV.shape
    top_B1 = logits_BV.amax(-1, keepdim=True)
    weights = (logits_BV - top_B1).exp_()
    if padding := -vocabulary % min(_BLOCK, vocabulary):
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, min(_BLOCK, vocabulary))
    cumulative = torch.nn.functional.pad(blocks.sum(-1).cumsum(-1, dtype=torch.float64), (1, 0))
    target = uniform_B1 * cumulative[:, -1:]  # below the total: the largest uniform number is 1 - 2^-53
    # The clamps are for logits that are not finite: an index in range, and a NaN log-prob by which the caller knows.
    block = (torch.searchsorted(cumulative, target, right=True) - 1).clamp_(0, blocks.shape[1] - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, blocks.shape[-1]))[:, 0].cumsum(-1, dtype=torch.float64)
    # The float32 sum of a block may exceed its float64 sum in the last bits: stay within the block's last token that has any weight.
    offset = torch.minimum(target - cumulative.gather(-1, block), inside[:, -1:].nextafter(inside.new_zeros(())))
    ids = (block * blocks.shape[-1] + torch.searchsorted(inside, offset, right=True)).clamp_(max=vocabulary - 1)
    return ids, logits_BV.gather(-1, ids) - top_B1 - cumulative[:, -1:].log().float()
