"""Groups to training samples. Numbers in parentheses are rows of the table of known failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.config import AlgorithmConfig
from drumroll.errors import RunError
from drumroll.rollout.samples import from_groups, minibatches, shaped_rewards, with_advantages
from drumroll.types import FinishReason, Group, Prompt, Rollout, TrainSample

EOS = 9


def rollout(index: int, tokens: list[int], reward: float | None, finish: FinishReason = "stop") -> Rollout:
    return Rollout(index, tokens, [-0.5 - t / 10 for t in range(len(tokens))], 0, finish, "", reward)


def group(group_id: int, rollouts: list[Rollout], prompt: list[int] | None = None) -> Group:
    return Group(Prompt(group_id, f"p{group_id}", "", prompt or [1, 2], {}), rollouts)


def algorithm(**tree: Any) -> Algorithm:
    return resolve(AlgorithmConfig.model_validate({"name": "dr_grpo", **tree}), 10)


def test_the_end_token_carries_loss_whatever_its_id() -> None:  # (20), (21): pad = EOS = 9 also in the prompt; a second end id 8
    samples = from_groups([group(7, [rollout(0, [5, 6, EOS], 1.0), rollout(1, [5, 8], 0.0)], prompt=[EOS, 3, EOS])])
    assert samples[0].token_ids.tolist() == [EOS, 3, EOS, 5, 6, EOS]
    assert samples[0].target_mask.tolist() == [False] * 3 + [True] * 3
    assert samples[0].n_targets == 3
    assert samples[1].token_ids.tolist() == [EOS, 3, EOS, 5, 8]
    assert samples[1].target_mask.tolist() == [False] * 3 + [True] * 2
    assert [(s.group_id, s.index) for s in samples] == [(7, 0), (7, 1)]


def test_dtypes_and_engine_log_probs() -> None:
    sample = from_groups([group(0, [rollout(0, [5, 6, 7], 1.0)])])[0]
    assert (sample.token_ids.dtype, sample.target_mask.dtype) == (np.int64, np.bool_)
    assert sample.engine_logprobs is not None
    assert sample.engine_logprobs.dtype == np.float32
    assert sample.engine_logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7])
    assert sample.advantages is None


def test_samples_without_a_verdict_or_a_token_are_left_out() -> None:  # (11)
    groups = [group(0, [rollout(0, [5], 1.0), rollout(1, [5], 0.0), rollout(2, [5, 5], None), rollout(3, [5], 1.0)])]
    samples = with_advantages(from_groups(groups), groups, algorithm(), 10)
    assert [s.index for s in samples] == [0, 1, 3]
    assert [float(s.advantages[0]) for s in samples if s.advantages is not None] == pytest.approx([1 / 3, -2 / 3, 1 / 3], abs=1e-7)
    assert [s.index for s in from_groups([group(0, [rollout(0, [], 0.0), rollout(1, [5], 1.0)])])] == [1]


def test_advantages_are_the_same_for_every_token_of_a_response() -> None:
    groups = [group(0, [rollout(0, [5, 6, 7], 1.0), rollout(1, [5], 0.0)])]
    samples = from_groups(groups)
    scored = with_advantages(samples, groups, algorithm(), 10)
    assert [s.advantages.tolist() for s in scored if s.advantages is not None] == [[0.5, 0.5, 0.5], [-0.5]]
    assert all(s.advantages is not None and s.advantages.dtype == np.float32 for s in scored)
    assert samples[0].advantages is None  # pure: the input is as it was


@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_masked_overlong_samples_stay_in_the_baseline(overlong: str) -> None:
    groups = [group(0, [rollout(0, [5], 1.0), rollout(1, [5] * 10, 0.0, "length")])]
    samples = with_advantages(from_groups(groups), groups, algorithm(overlong=overlong), 10)
    assert [s.index for s in samples] == ([0, 1] if overlong == "keep" else [0])
    assert samples[0].advantages is not None
    assert samples[0].advantages.tolist() == [0.5]


def test_soft_overlong_penalty_enters_the_reward() -> None:
    groups = [group(0, [rollout(0, [5] * 5, 1.0), rollout(1, [5] * 8, 1.0), rollout(2, [5] * 10, None, "length")])]
    shaped = shaped_rewards(from_groups(groups), groups, algorithm(overlong="shape", overlong_buffer=4), 10)
    assert shaped == [[1.0, 0.5, None]]


def test_kl_in_the_reward_uses_the_trainers_log_probs_over_the_whole_response() -> None:
    groups = [group(0, [rollout(0, [5, 6], 1.0), rollout(1, [5], 1.0), rollout(2, [5], None)])]
    samples = from_groups(groups)
    reward_kl = algorithm(kl={"coef": 0.1, "estimator": "k1", "where": "reward"})
    with pytest.raises(RunError, match="group 0 sample 0"):
        shaped_rewards(samples, groups, reward_kl, 10)
    for sample, old, ref in zip(samples, ([-1.0, -2.0], [-1.0]), ([-2.0, -2.5], [-0.5]), strict=True):
        sample.old_logprobs, sample.ref_logprobs = np.array(old, np.float32), np.array(ref, np.float32)
    assert shaped_rewards(samples, groups, reward_kl, 10) == [[1.0 - 0.1 * 1.5, 1.0 + 0.1 * 0.5, None]]
    scored = with_advantages(samples, groups, reward_kl, 10)
    assert [float(s.advantages[0]) for s in scored if s.advantages is not None] == pytest.approx([-0.1, 0.1], abs=1e-7)


def train_sample(group_id: int, index: int) -> TrainSample:
    return TrainSample(np.array([1, 2]), np.array([False, True]), group_id=group_id, index=index)


def test_minibatches_are_whole_groups_in_group_order() -> None:
    ids = [30, 10, 20, 50, 40]
    samples = [train_sample(g, i) for g in ids for i in range(3)]
    for k, sizes in {1: [5], 2: [3, 2], 3: [2, 2, 1], 5: [1] * 5, 8: [1] * 5}.items():
        batches = minibatches(samples, k)
        assert [s for batch in batches for s in batch] == samples
        assert [len({s.group_id for s in batch}) for batch in batches] == sizes
    assert minibatches([], 4) == []


def test_minibatches_of_uneven_groups_never_split_one() -> None:
    samples = [train_sample(g, i) for g, n in ((1, 5), (2, 1), (3, 2)) for i in range(n)]
    assert [[(s.group_id, s.index) for s in batch] for batch in minibatches(samples, 2)] == [
        [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0)],
        [(3, 0), (3, 1)],
    ]
