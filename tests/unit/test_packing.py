"""Packing: each sample once, the same number of passes on every rank, the cap held, a pure function."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.packing import _PASS, collate, denominators, pack, padded_cost
from drumroll.types import Denominators, TrainSample

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
RANKS = st.integers(1, 6)
CAPS = st.integers(1, 1000)


def _sample(length: int, targets: list[int], group: int = -1, **arrays: np.ndarray) -> TrainSample:
    mask = np.zeros(length, bool)
    mask[targets] = True
    return TrainSample(np.arange(length, dtype=np.int64), mask, group_id=group, **arrays)


@given(LENGTHS, RANKS, CAPS)
def test_each_sample_is_packed_exactly_once(lengths: list[int], ranks: int, cap: int) -> None:
    assert sorted(index for rank in pack(lengths, ranks, cap) for micro in rank for index in micro) == list(range(len(lengths)))


@given(LENGTHS, RANKS, CAPS)
def test_every_rank_has_the_same_number_of_passes(lengths: list[int], ranks: int, cap: int) -> None:
    plan = pack(lengths, ranks, cap)
    assert len(plan) == ranks
    assert len({len(micros) for micros in plan}) == 1
    assert all(any(micros) for micros in zip(*plan, strict=True))  # no pass is a fill-in everywhere


@given(LENGTHS, RANKS, CAPS)
def test_cap_holds_but_for_a_single_longer_sample(lengths: list[int], ranks: int, cap: int) -> None:
    for micro in (m for rank in pack(lengths, ranks, cap) for m in rank):
        assert padded_cost(micro, lengths) <= cap or len(micro) == 1


@given(LENGTHS, RANKS, CAPS)
def test_same_arguments_same_plan(lengths: list[int], ranks: int, cap: int) -> None:
    assert pack(lengths, ranks, cap) == pack(tuple(lengths), ranks, cap)


@given(LENGTHS, RANKS)
def test_ranks_differ_by_at_most_one_row_in_every_pass(lengths: list[int], ranks: int) -> None:
    for micros in zip(*pack(lengths, ranks, 500), strict=True):
        rows = [len(micro) for micro in micros]
        assert max(rows) - min(rows) <= 1


@given(LENGTHS, st.integers(1, 3), st.integers(2, 4), CAPS)
def test_ranks_that_share_hold_the_cap_together(lengths: list[int], groups: int, sharing: int, cap: int) -> None:
    plan = pack(lengths, groups * sharing, cap, sharing)
    assert sorted(index for rank in plan for micro in rank for index in micro) == list(range(len(lengths)))
    assert len(plan) == groups * sharing
    assert len({len(micros) for micros in plan}) == 1
    for first in range(0, groups * sharing, sharing):
        for micros in zip(*plan[first : first + sharing], strict=True):
            together = [index for micro in micros for index in micro]
            assert padded_cost(together, lengths) <= sharing * cap or len(together) == 1
            assert max(map(len, micros)) - min(map(len, micros)) <= 1


def test_a_sequence_that_one_rank_could_not_hold_is_alone_with_its_group() -> None:
    assert pack([90, 80], 4, cap=50, sharing=2) == [[[0]], [[]], [[1]], [[]]]
    with pytest.raises(ValueError, match="a divisor of ranks=4, got sharing=3"):
        pack([1], 4, 50, sharing=3)


@given(LENGTHS, CAPS)
def test_the_cut_costs_least(lengths: list[int], cap: int) -> None:
    """Against the plain recurrence, and never more than cutting greedily."""
    tokens = sorted(lengths, reverse=True)[:12]

    def least(rest: tuple[int, ...]) -> int:
        fits = [k for k in range(1, len(rest) + 1) if k == 1 or k * rest[0] <= cap]
        return min((k * rest[0] + cap // _PASS + least(rest[k:]) for k in fits), default=0)

    [micros] = pack(tokens, 1, cap)
    assert sum(padded_cost(micro, tokens) + cap // _PASS for micro in micros) == least(tuple(tokens))


def test_ranks_wait_little_and_pad_little_on_long_tailed_lengths() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 65, 256).clip(1, 256).tolist()
    plan = pack(lengths, 4, 2048)
    costs = np.array([[padded_cost(micro, lengths) for micro in rank] for rank in plan])  # [rank, pass]
    assert costs.sum() / sum(lengths) < 1.13  # padding
    assert 4 * costs.max(axis=0).sum() / costs.sum() < 1.02  # what waiting in every pass adds


def test_ranks_with_long_and_short_samples_pass_equally_often() -> None:
    """Failure case 58: 5 long and 5 short samples, cap 100: 3 against 2 passes hung the job."""
    lengths = [50] * 5 + [20] * 5
    plan = pack(lengths, 2, 100)
    assert [[len(micro) for micro in micros] for micros in plan] == [[1, 2, 2], [1, 2, 2]]
    assert [len(micros) for micros in pack([90, 80, 70], 2, 100)] == [2, 2]  # three samples, four places: one fill-in


def test_no_sample_needs_no_pass() -> None:
    assert pack([], 3, 10) == [[], [], []]


@pytest.mark.parametrize(("ranks", "cap"), [(0, 10), (1, 0)])
def test_senseless_arguments_are_refused(ranks: int, cap: int) -> None:
    with pytest.raises(ValueError, match="ranks >= 1 and cap >= 1"):
        pack([1], ranks, cap)


def test_samples_without_a_target_count_in_no_denominator() -> None:
    samples = [_sample(4, [1, 2], group=7), _sample(4, [3], group=7), _sample(4, [], group=8), _sample(3, [1], group=9)]
    assert denominators(samples) == Denominators(tokens=4, sequences=3, groups=2)
    assert denominators([]) == Denominators(0, 0, 0)
    assert denominators([_sample(3, [1]), _sample(3, [2])]).groups == 2  # no group: each its own


def test_collate_is_flat_and_ragged() -> None:
    advantages = np.array([0.5], np.float32), np.array([1.0, 2.0], np.float32)
    micro = collate([_sample(3, [2], advantages=advantages[0]), _sample(4, [1, 3], advantages=advantages[1])])
    assert micro.token_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert micro.lengths == [3, 4]
    assert micro.target_positions.tolist() == [2, 4, 6]
    assert micro.target_lengths.tolist() == [1, 2]
    assert micro.advantages is not None
    assert micro.advantages.tolist() == [0.5, 1.0, 2.0]
    assert micro.old_logprobs is None


def test_a_fill_in_has_every_array_and_all_are_empty() -> None:
    micro = collate([])
    for tensor in (micro.token_ids, micro.target_positions, micro.target_lengths):
        assert (tensor.shape, tensor.dtype) == ((0,), torch.int64)
    for values in (micro.advantages, micro.engine_logprobs, micro.old_logprobs, micro.ref_logprobs):
        assert values is not None
        assert (values.shape, values.dtype) == ((0,), torch.float32)


def test_collate_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="start with False"):
        collate([_sample(3, [0])])
    with pytest.raises(ValueError, match="expected advantages for 2 targets"):
        collate([_sample(3, [1, 2], advantages=np.zeros(1, np.float32))])
    with pytest.raises(ValueError, match="sample 1: expected old_logprobs"):
        collate([_sample(3, [1], old_logprobs=np.zeros(1, np.float32)), _sample(3, [1])])
