"""What is left out of a batch, and what pays for its length."""

from __future__ import annotations

import pytest

from drumroll.algorithms.filters import has_variance, is_overlong, shape_overlong, soft_overlong_penalty
from drumroll.types import Rollout


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], True),
        ([0.1, 0.1, 0.1], False),
        ([1.0, None], False),
        ([None, None], False),
        ([], False),
        ([0.3, None, 0.7], True),
        ([0.35] * 7 + [0.0], True),
    ],
)
def test_groups_without_variance(rewards: list[float | None], expected: bool) -> None:
    assert has_variance(rewards) is expected


def test_soft_overlong_penalty_on_the_papers_lengths() -> None:
    # DAPO: 16384 tokens expected, 4096 more allowed.
    at = {0: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    for length, penalty in at.items():
        assert soft_overlong_penalty(length, max_tokens=20480, buffer=4096) == penalty


def test_shaping_leaves_abstentions_alone() -> None:
    assert shape_overlong([1.0, None, 0.0], [8, 10, 10], max_tokens=10, buffer=4) == [0.5, None, -1.0]


def test_overlong_is_the_finish_reason_not_the_length() -> None:
    def rollout(reason: str) -> Rollout:
        return Rollout(0, [5, 6], [-1.0, -1.0], 0, reason, "")  # type: ignore[arg-type]

    assert is_overlong(rollout("length"))
    assert not is_overlong(rollout("stop"))
