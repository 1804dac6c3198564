"""Which groups of what was drawn a step trains on, and that the others are not lost to the records."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.config import AlgorithmConfig, DataConfig, RewardConfig
from drumroll.data.rows import Row
from drumroll.data.sources import LoadedRows
from drumroll.data.stream import PromptStream
from drumroll.engines.base import Completion, GenerateRequest, SamplingParams
from drumroll.models.builtin import tokenizer
from drumroll.observe.metrics import rollout_facts
from drumroll.observe.timer import PhaseTimer
from drumroll.pipelines.rl import collect
from drumroll.rewards.base import RewardSet
from drumroll.rollout.rollouter import Rollouter
from drumroll.types import Group

PARAMS = SamplingParams(max_tokens=4, temperature=1.0, eos_ids=(2,))


def half_right(requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Sample 0 of a prompt with an even id is right, every other sample is wrong: odd groups have no variance."""
    return [
        Completion(
            group_id=r.group_id, index=i, token_ids=[5, 2], logprobs=[-1.0, -1.0], version=0, finish_reason="stop",
            text="right" if r.group_id % 2 == 0 and i == 0 else "wrong",
        )
        for r in requests
        for i in range(r.n)
    ]  # fmt: skip


def drawn_and_kept(wanted: int, **options: object) -> tuple[list[Group], list[Group]]:
    data = DataConfig.model_validate({"train": {"path": "unused"}, "shuffle": False})
    rows = LoadedRows([Row(f"r:{i}", {"prompt": str(i), "answer": "right"}) for i in range(100)])
    algorithm: Algorithm = resolve(AlgorithmConfig.model_validate({"name": "grpo", "group_size": 2, **options}), 4)
    with RewardSet([RewardConfig(fn="exact")]) as rewards:
        rollouter = Rollouter(half_right, rewards, PhaseTimer())
        return collect(PromptStream(rows, tokenizer(), data, 0), rollouter, algorithm, wanted, PARAMS)


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.group_id for group in groups]


def test_without_dynamic_sampling_all_that_is_drawn_is_trained_on() -> None:
    drawn, kept = drawn_and_kept(6)
    assert ids(drawn) == ids(kept) == [0, 1, 2, 3, 4, 5]


def test_dynamic_sampling_draws_again_and_keeps_what_it_left_out_for_the_records() -> None:
    drawn, kept = drawn_and_kept(6, dynamic_sampling=True)
    assert ids(kept) == [0, 2, 4, 6, 8, 10]
    assert ids(drawn) == list(range(12))
    facts = rollout_facts(drawn)
    assert (facts.groups, facts.rollouts, facts.no_variance_share, facts.reward_mean) == (12, 24, 0.5, 0.25)


def test_dynamic_sampling_gives_up_with_what_it_has() -> None:
    drawn, kept = drawn_and_kept(6, dynamic_sampling=True, max_draws=1)
    assert ids(kept) == [0, 2, 4]
    assert ids(drawn) == [0, 1, 2, 3, 4, 5]
