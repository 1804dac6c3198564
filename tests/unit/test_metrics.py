"""What a step record says, from groups and optimizer steps whose answers are known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from drumroll.observe import jsonl
from drumroll.observe.metrics import (
    StepRecord,
    eval_record,
    rl_record,
    rollout_facts,
    rollout_records,
    sft_record,
    tokens_digest,
    update_facts,
)
from drumroll.observe.timer import PhaseSeconds, PhaseTimer
from drumroll.types import Stat, StepStats, TrainSample
from tests.records import group

REQUIRED = {"phase", "step", "loss", "loss_abs", "grad_norm", "entropy", "logprob_mean", "tokens_digest"}
REQUIRED |= {"advantage_abs_mean", "reward_mean"}


def stats(loss: float, entropy: float, count: int, gap_max: float = 0.0) -> dict[str, Stat]:
    return {
        "loss": Stat(loss, count, loss),
        "loss_abs": Stat(abs(loss) * 2, count, 1.0),
        "logprob": Stat(-0.5 * count, count, 0.0),
        "entropy": Stat(entropy * count, count, entropy),
        "advantage_abs": Stat(0.25 * count, count, 1.0),
        "logprob_gap": Stat(gap_max * count / 2, count, gap_max),
        "logprob_gap_high": Stat(1.0, count, 1.0),
    }


def test_digest_is_stable_and_sees_values_order_and_borders() -> None:
    assert tokens_digest([[1, 2], [3]]) == tokens_digest([np.array([1, 2]).tolist(), (3,)]) == "be3cb7e04dcce365"
    different = [[[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[2, 1], [3]], [[1, 2], [4]], [[1, 2], [3], []], [[1, 2, 3]], []]
    assert len({tokens_digest(batch) for batch in different}) == len(different)


def test_rollout_facts_of_known_groups() -> None:
    groups = [
        group([1.0, 0.0, None, 1.0], lengths=[2, 4, 6, 8], cut=1),  # varies
        group([0.1, 0.1, 0.1, 0.1], group_id=1),  # equal, though its standard deviation in floats is not exactly zero
        group([None, None, None, 0.5], group_id=2),  # one verdict alone teaches nothing
        group([0.0, 1.0, 0.0, 1.0], group_id=3),
    ]
    facts = rollout_facts(groups)
    assert (facts.groups, facts.rollouts, facts.abstentions) == (4, 16, 4)
    assert facts.reward_mean == pytest.approx((2 + 0.4 + 0.5 + 2) / 12, rel=1e-12)
    assert (facts.reward_min, facts.reward_max) == (0.0, 1.0)
    assert facts.no_variance_share == 0.5
    assert facts.truncated_share == 1 / 16
    assert facts.response_tokens_mean == (20 + 24) / 16
    assert (facts.response_tokens_max, facts.prompt_tokens_mean, facts.tokens) == (8, 3.0, 4 * 3 + 44)
    assert facts.rewards == {"exact": facts.reward_mean}


def test_no_verdict_at_all_is_none_not_zero() -> None:
    facts = rollout_facts([group([None, None])])
    assert facts.reward_mean is None and facts.reward_max is None and facts.rewards == {}
    assert math.isnan(eval_record(step=0, version=0, groups=[group([None])], seconds=1.0).score)


def test_optimizer_steps_merge_by_token_not_by_step() -> None:
    updates = [
        StepStats(grad_norm=1.0, skipped=False, stats=stats(0.2, entropy=1.0, count=30, gap_max=0.01)),
        StepStats(grad_norm=3.0, skipped=False, stats=stats(0.4, entropy=2.0, count=10, gap_max=0.03)),
        StepStats(grad_norm=math.inf, skipped=True, stats=stats(0.6, entropy=2.0, count=10, gap_max=0.02)),
    ]
    facts = update_facts(updates, lr=1e-4)
    assert facts.loss == pytest.approx(0.4, rel=1e-12) and facts.loss_abs == pytest.approx(0.8, rel=1e-12)
    assert facts.entropy == (30 * 1.0 + 20 * 2.0) / 50
    assert (facts.grad_norm, facts.optimizer_steps, facts.skipped_steps, facts.train_tokens) == (2.0, 3, 1, 50)
    assert facts.logprob_gap_max == 0.03 and facts.logprob_gap_share == 3 / 50
    assert facts.kl is None and facts.clip_share is None, "what the losses did not report is not zero"


def test_a_step_without_an_applied_update_has_no_gradient_norm() -> None:
    skipped = update_facts([StepStats(math.nan, True, stats(0.1, 1.0, 4))], lr=1e-4)
    assert math.isnan(skipped.grad_norm) and skipped.skipped_steps == 1
    nothing = update_facts([], lr=1e-4)  # every group was filtered away
    assert (nothing.loss, nothing.optimizer_steps, nothing.train_tokens) == (0.0, 0, 0)


def rl() -> StepRecord:
    groups = [group([1.0, 0.0])]
    return rl_record(
        step=7,
        version=6,
        tokens_digest=tokens_digest([[1]]),
        update=update_facts([StepStats(math.nan, True, stats(0.1, 1.0, 4))], lr=1e-4),
        rollouts=rollout_facts(groups),
        seconds=PhaseSeconds(generate=1.0, train=0.5, total=2.0),
        peak_bytes=123,
    )


def test_a_step_is_one_flat_json_object_with_the_promised_keys() -> None:
    record = rl()
    row = json.loads(jsonl.dumps(record))
    assert row.keys() >= REQUIRED
    assert (row["phase"], row["step"], row["grad_norm"], row["reward_mean"]) == ("rl", 7, "NaN", 0.5)
    assert (row["seconds_generate"], row["seconds_total"], row["tokens_per_second"]) == (1.0, 2.0, (3 + 4) / 2.0)
    back = jsonl.decode(StepRecord, row, "x")
    assert math.isnan(back.grad_norm)
    assert jsonl.dumps(back) == jsonl.dumps(record)


def test_an_sft_step_has_the_same_keys() -> None:
    update = update_facts([StepStats(1.0, False, stats(0.1, 1.0, 4))], lr=1e-4)
    record = sft_record(step=1, tokens_digest="0" * 16, tokens=10, update=update, seconds=PhaseSeconds(train=0.5, total=0.5), peak_bytes=1)
    assert json.loads(jsonl.dumps(record)).keys() == json.loads(jsonl.dumps(rl())).keys()
    assert record.reward_mean is None and record.tokens_per_second == 20.0


def test_rollouts_carry_their_own_advantage() -> None:
    groups = [group([1.0, 0.0, None], group_id=5)]
    samples = [
        TrainSample(np.arange(5), np.array([False] * 3 + [True] * 2), np.full(2, a, np.float32), group_id=5, index=i)
        for i, a in ((1, -0.5), (0, 0.5))
    ]
    records = rollout_records(groups, phase="train", step=2, samples=samples)
    assert [(r.index, r.reward, r.advantage) for r in records] == [(0, 1.0, 0.5), (1, 0.0, -0.5), (2, None, None)]
    assert records[0].prompt == "21=" and records[0].columns == {"answer": "12"} and records[0].version == 3


def test_columns_that_json_does_not_know_are_shown_as_text() -> None:
    one = group([1.0])
    one.prompt = type(one.prompt)(0, "x", "p", [1], {"n": 3, "tags": ["a"], "when": complex(1, 2)})
    row = json.loads(jsonl.dumps(rollout_records([one], phase="eval", step=0)[0]))
    assert row["columns"] == {"n": 3, "tags": ["a"], "when": "(1+2j)"}


def test_the_timer_adds_up_phases_and_starts_again() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("train"):
            sum(range(100_000))
    with pytest.raises(ZeroDivisionError), timer.phase("sync"):
        raise ZeroDivisionError
    taken = timer.take()
    assert 0 < taken.train < taken.total and taken.sync > 0 and taken.generate == 0
    assert timer.take().train == 0
