"""Sampling: uniform numbers by identity, the filters, log-probs under the distribution sampled from (failure case 68)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.engines.base import SamplingParams
from drumroll.engines.sampling import Distribution, check, sample, stream_key, uniform
from drumroll.errors import UserError

CPU = torch.device("cpu")


def draws(logits_V: torch.Tensor, params: SamplingParams, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([stream_key(seed, "train", 0, i) for i in range(count)])
    distribution = Distribution.of([params] * count, logits_V.shape[0], CPU)
    return sample(logits_V.expand(count, -1), uniform(keys, torch.zeros_like(keys)), distribution)


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail of the chi-square statistic, bins with fewer than 5 expected draws pooled (Wilson and Hilferty 1931)."""
    if observed[expected == 0].sum() > 0:
        return 0.0
    observed, expected = observed[expected > 0], expected[expected > 0]
    small = expected < 5
    if small.any():
        observed = torch.cat((observed[~small], observed[small].sum(0, keepdim=True)))
        expected = torch.cat((expected[~small], expected[small].sum(0, keepdim=True)))
    statistic, dof = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    z = ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))
    return 0.5 * math.erfc(z / math.sqrt(2))


def plain_filter(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Probabilities after the documented order of filters, written as a loop over one distribution."""
    probs = (logits.double() / p.temperature).softmax(-1)
    ranked = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    kept = ranked[: p.top_k] if p.top_k else ranked
    mass = sum(float(probs[i]) for i in kept)
    if p.top_p < 1:
        nucleus, total = [], 0.0
        for i in kept:
            if total >= p.top_p * mass:
                break
            nucleus.append(i)
            total += float(probs[i])
        kept = nucleus
    kept = [i for i in kept if float(probs[i]) >= p.min_p * float(probs[ranked[0]])]
    out = torch.zeros_like(probs)
    out[kept] = probs[kept]
    return out / out.sum()


FILTERS = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.6),
    SamplingParams(1, top_k=5),
    SamplingParams(1, top_p=0.7),
    SamplingParams(1, min_p=0.1),
    SamplingParams(1, temperature=1.3, top_k=20, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_frequencies_match_the_distribution_and_logprobs_are_its_own(params: SamplingParams) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    ids, logprobs = draws(logits, params, 4000)
    want = plain_filter(logits, params)
    assert chi_square_p(torch.bincount(ids, minlength=64).double(), want * 4000) > 1e-3
    assert float((logprobs.double() - want.log()[ids]).abs().max()) < 1e-6


def test_the_chi_square_test_can_fail() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    ids, _ = draws(logits, SamplingParams(1, temperature=0.8), 4000)
    assert chi_square_p(torch.bincount(ids, minlength=64).double(), logits.double().softmax(-1) * 4000) < 1e-6


@pytest.mark.parametrize("vocabulary", [1, 3, 255, 256, 257, 1000, 5000])
def test_inverse_cdf_in_blocks_equals_one_running_sum(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    keys = torch.tensor([stream_key(0, "train", 7, i) for i in range(500)])
    u = uniform(keys, torch.zeros_like(keys))
    ids, logprobs = draws_at(logits, u)
    cdf = logits.double().softmax(-1).cumsum(-1)
    want = torch.searchsorted(cdf, u, right=True).clamp(max=vocabulary - 1)
    assert float((ids == want).double().mean()) > 0.995  # the rest are ties of rounding at a border: the neighbours
    assert int((ids - want).abs().max()) <= 1
    assert float((logprobs - logits.log_softmax(-1)[ids]).abs().max()) < 2e-6


def draws_at(logits_V: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(logits_V.expand(len(u), -1), u, Distribution.of([SamplingParams(1)] * len(u), logits_V.shape[0], CPU))


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(u: float) -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[[300, 301, 700]] = torch.tensor([0.0, -40.0, 1.0])
    ids, logprobs = draws_at(logits, torch.tensor([u], dtype=torch.float64))
    assert ids.tolist() == [300 if u == 0 else 700]
    assert torch.isfinite(logprobs).all()


def test_uniform_numbers_are_uniform_and_independent_of_their_neighbours() -> None:
    keys = torch.tensor([stream_key(0, "train", g, i) for g in range(50) for i in range(8)])
    u = torch.stack([uniform(keys, torch.full_like(keys, t)) for t in range(50)], 1)
    assert u.dtype == torch.float64 and float(u.min()) >= 0 and float(u.max()) < 1
    counts = torch.histc(u.flatten().float(), 64, 0, 1).double()
    assert chi_square_p(counts, torch.full((64,), u.numel() / 64, dtype=torch.float64)) > 1e-3
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):  # the next position; the next sample or group
        correlation = float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])
        assert abs(correlation) < 4 / math.sqrt(a.numel())


def test_stream_key_is_pinned_and_depends_on_every_part() -> None:
    base = (0, "train", 5, 2)
    assert stream_key(*base) == stream_key(*base)
    others = [(1, "train", 5, 2), (0, "eval", 5, 2), (0, "train", 6, 2), (0, "train", 5, 3), (0, "train", 2, 5)]
    assert len({stream_key(*base), *(stream_key(*o) for o in others)}) == 6
    assert -(2**63) <= stream_key(-1, "eval", 2**62, 10**9) < 2**63  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**63 - 1), group=st.integers(0, 2**40), index=st.integers(0, 1000), position=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_uniform_is_splitmix64(seed: int, group: int, index: int, position: int) -> None:
    mask = (1 << 64) - 1
    z = (stream_key(seed, "train", group, index) + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    want = ((z ^ (z >> 31)) >> 11) * 2.0**-53
    assert float(uniform(torch.tensor([stream_key(seed, "train", group, index)]), torch.tensor([position]))) == want


def test_rows_of_one_batch_have_their_own_distributions() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    params = [*FILTERS, SamplingParams(1, temperature=0)]
    u = torch.linspace(0, 0.999, len(params), dtype=torch.float64)
    ids, logprobs = sample(logits.expand(len(params), -1), u, Distribution.of(params, 64, CPU))
    for row, p in enumerate(params):
        one, logprob = sample(logits[None], u[row : row + 1], Distribution.of([p], 64, CPU))
        assert (int(one), float(logprob)) == (int(ids[row]), float(logprobs[row]))


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_k", [0, 3000])
def test_a_large_vocabulary_is_cut_as_a_small_one(scale: float, top_k: int) -> None:
    """The nucleus of a flat distribution is wider than the candidates looked at first, that of a peaked one is not."""
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(5)) * scale
    params = SamplingParams(1, top_p=0.9, top_k=top_k)
    ids, logprobs = draws(logits, params, 200)
    want = plain_filter(logits, params).log()
    assert float((logprobs.double() - want[ids]).abs().max()) < 2e-6


def test_greedy_takes_the_first_best_token_with_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    greedy = Distribution.of([SamplingParams(1, temperature=0, top_k=1)], 4, CPU)
    ids, logprobs = sample(logits, torch.tensor([0.9], dtype=torch.float64), greedy)
    assert ids.tolist() == [1]
    assert float(logprobs) == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-7)


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    ids, logprobs = draws(torch.zeros(10), SamplingParams(1, top_k=3), 300)
    assert len(set(ids.tolist())) == 3
    assert float((logprobs + math.log(3)).abs().max()) < 1e-6


WRONG = [("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.0)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name):
        check(replace(SamplingParams(1), **{name: value}))  # type: ignore[arg-type]
