"""Advantages, whitening and GAE. Numbers in parentheses are rows of the table of known failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drumroll.algorithms.advantage import GROUP_KINDS, AdvantageKind, compute, gae, whiten

BOOL = np.bool_


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch"])
@pytest.mark.parametrize("n", [4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_rewards_give_exactly_zero(kind: AdvantageKind, n: int, dtype: torch.dtype) -> None:  # (10b)
    for tenth in range(1, 10):
        reward = float(torch.tensor(tenth / 10, dtype=dtype))
        assert compute(kind, [[reward] * n]) == [[0.0] * n]


def test_leave_one_out_of_equal_others_is_the_difference() -> None:  # (10a)
    rewards = [float(np.float32(0.35))] * 7 + [0.0]
    advantages = compute("leave_one_out", [rewards])[0]
    assert advantages[7] == pytest.approx(-0.35, abs=1e-7)
    assert advantages[:7] == pytest.approx([0.35 - 6 * 0.35 / 7] * 7, abs=1e-7)


def test_nearly_equal_rewards_keep_their_spread() -> None:  # (10c)
    assert compute("group", [[1.0, float(np.float32(1.00001))]])[0] == pytest.approx([-0.6196, 0.6196], abs=1e-4)


def test_equal_groups_stay_at_zero_beside_others_under_the_batch_std() -> None:
    advantages = compute("group_mean_batch_std", [[0.1] * 8, [0.7, 0.1, 0.3], [0.7] * 5])
    assert advantages[0] == [0.0] * 8
    assert advantages[2] == [0.0] * 5
    centred = np.array([0.7, 0.1, 0.3]) - np.mean([0.7, 0.1, 0.3])
    std = np.sqrt((centred**2).sum() / 16)
    assert advantages[1] == pytest.approx((centred / (std + 1e-6)).tolist(), abs=1e-12)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_single_sample_has_advantage_zero(kind: AdvantageKind) -> None:  # (11)
    assert compute(kind, [[0.7], [0.3]]) == [[0.0], [0.0]]


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch", "raw"])
def test_no_verdict_at_all_gives_zeros(kind: AdvantageKind) -> None:  # (11)
    assert compute(kind, [[None, None], []]) == [[0.0, 0.0], []]
    assert compute(kind, []) == []


def test_a_missing_verdict_enters_no_baseline() -> None:  # (11)
    rewards = [[1.0, 0.0, None, 1.0]]
    assert compute("group_mean", rewards)[0] == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3], abs=1e-15)
    assert compute("group_mean", rewards)[0][2] == 0.0
    assert compute("leave_one_out", rewards)[0] == pytest.approx([0.5, -1.0, 0.0, 0.5], abs=1e-15)
    assert compute("raw", rewards)[0] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", [*GROUP_KINDS, "batch", "raw"])
def test_a_missing_verdict_changes_nobody_else(kind: AdvantageKind) -> None:
    without = compute(kind, [[1.0, 0.25], [0.5, 2.0, 0.0]])
    beside = compute(kind, [[1.0, None, 0.25], [None, 0.5, 2.0, 0.0]])
    assert beside == [[without[0][0], 0.0, without[0][1]], [0.0, *without[1]]]


def test_each_kind_against_its_formula() -> None:
    rewards = [[1.0, 0.0, 3.0], [2.0, 5.0]]
    flat = np.array([1.0, 0.0, 3.0, 2.0, 5.0])
    means = np.array([4 / 3] * 3 + [3.5] * 2)
    group_std = np.array([np.sqrt(7 / 3)] * 3 + [np.sqrt(4.5)] * 2)  # sums of squares 14/3 and 4.5 over n - 1
    expected = {
        "raw": flat,
        "group_mean": flat - means,
        "group": (flat - means) / (group_std + 1e-6),
        "leave_one_out": np.array([1 - 1.5, 0 - 2, 3 - 0.5, 2 - 5, 5 - 2]),
        "batch": (flat - 2.2) / (np.sqrt(2.96) + 1e-6),
        "group_mean_batch_std": (flat - means) / (np.sqrt((14 / 3 + 4.5) / 5) + 1e-6),
    }
    for kind, values in expected.items():
        got = compute(kind, rewards)  # type: ignore[arg-type]
        assert [len(g) for g in got] == [3, 2]
        np.testing.assert_allclose(np.concatenate(got), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [0.0, 1e3, np.nan, -np.inf])
def test_whitening_with_few_valid_cells(garbage: float) -> None:  # (7), (4)
    values = np.array([[3.0, garbage], [garbage, 5.0]])
    none, one, two = np.zeros((2, 2), BOOL), np.array([[1, 0], [0, 0]], BOOL), np.array([[1, 0], [0, 1]], BOOL)
    assert whiten(values, none).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert whiten(values, one).tolist() == [[3.0, 0.0], [0.0, 0.0]]
    got = whiten(values, two)[two]
    assert got.mean() == pytest.approx(0.0, abs=1e-12)
    assert got.std() == pytest.approx(1.0, abs=2e-6)


@pytest.mark.parametrize("lone", [[[None, 0.7], [None]], [[0.7]]])
def test_a_batch_with_one_verdict_is_not_whitened(lone: list[list[float | None]]) -> None:  # (7), as the batch kinds meet it
    passed_through = [[0.0 if r is None else r for r in group] for group in lone]
    assert compute("batch", lone) == passed_through
    assert compute("group_mean_batch_std", lone) == [[0.0] * len(group) for group in lone]
    two = compute("batch", [[None, 0.7], [0.1]])
    assert [*two[0], *two[1]] == pytest.approx([0.0, 1.0, -1.0], abs=1e-5)


def test_whitening_ignores_padding() -> None:  # (8)
    values, mask = np.array([[2.0, 4.0, 0, 0], [6.0, 0, 0, 0]]), np.array([[1, 1, 0, 0], [1, 0, 0, 0]], BOOL)
    clean = whiten(values, mask)
    assert clean[mask] == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-4)
    for garbage in (1e3, np.nan):
        np.testing.assert_array_equal(whiten(np.where(mask, values, garbage), mask), clean)


def test_gae_ignores_a_value_in_a_masked_slot() -> None:  # (9)
    rewards, values, mask = np.array([[0.0, 1.0, 0.0]]), np.array([[0.0, 0.0, 100.0]]), np.array([[1, 1, 0]], BOOL)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == [0.95, 1.0, 0.0]
    assert returns[0].tolist() == [0.95, 1.0, 0.0]


@pytest.mark.parametrize("garbage", [0.0, 100.0, np.nan, np.inf])
def test_gae_steps_over_a_masked_gap(garbage: float) -> None:  # (9)
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(1, 4)), rng.normal(size=(1, 4))
    plain, plain_returns = gae(rewards, values, np.ones((1, 4), BOOL), gamma=0.9, lam=0.8)
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 0]], BOOL)
    gapped_rewards, gapped_values = np.full((1, 8), garbage), np.full((1, 8), garbage)
    gapped_rewards[mask], gapped_values[mask] = rewards[0], values[0]
    advantages, returns = gae(gapped_rewards, gapped_values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(advantages[mask], plain[0])
    np.testing.assert_array_equal(returns[mask], plain_returns[0])
    assert not advantages[~mask].any()


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    rng = np.random.default_rng(1)
    r, v = rng.normal(size=5), rng.normal(size=5)
    gamma, lam = 0.97, 0.9
    delta = [r[t] + gamma * (v[t + 1] if t < 4 else 0.0) - v[t] for t in range(5)]
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 5)) for t in range(5)]
    advantages, returns = gae(r[None], v[None], np.ones((1, 5), BOOL), gamma, lam)
    np.testing.assert_allclose(advantages[0], expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns[0], np.array(expected) + v, rtol=0, atol=1e-12)
