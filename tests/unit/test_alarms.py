"""Alarms come on for a sick run and stay off for a healthy one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumroll.observe.alarms import WINDOW, alarms
from drumroll.observe.metrics import StepRecord
from tests.records import healthy_history, sft_record


def kinds(history: list[StepRecord]) -> list[str]:
    return [alarm.kind for alarm in alarms(history)]


@pytest.mark.parametrize("seed", range(20))
def test_no_alarm_at_any_step_of_a_healthy_run(seed: int) -> None:
    history = [sft_record(step) for step in range(1, 4)] + healthy_history(120, seed)
    assert [(step, kinds(history[:step])) for step in range(len(history) + 1) if kinds(history[:step])] == []


def test_groups_without_variance() -> None:
    stuck = [replace(r, reward_mean=0.0, reward_max=0.0, no_variance_share=1.0) for r in healthy_history(WINDOW)]
    assert kinds(stuck) == ["no_variance"]
    assert kinds(stuck[:-1]) == [], "too early to tell"
    one_way = [replace(r, reward_mean=0.02, no_variance_share=0.9) for r in healthy_history(WINDOW)]
    assert kinds(one_way) == ["no_variance"]
    solved = [*healthy_history(40), *(replace(r, reward_mean=0.97, no_variance_share=0.9) for r in healthy_history(50)[40:])]
    assert kinds(solved) == [], "groups agree because they are right"


def test_truncation() -> None:
    history = healthy_history(20)
    history[-WINDOW:] = [replace(r, truncated_share=0.31) for r in history[-WINDOW:]]
    assert kinds(history) == ["truncation"]
    history[-WINDOW:] = [replace(r, truncated_share=0.29) for r in history[-WINDOW:]]
    assert kinds(history) == []


def test_entropy_collapse_needs_a_reward_that_stands_still() -> None:
    flat = [replace(r, reward_mean=0.5, entropy=0.5 if i < 10 else 0.05) for i, r in enumerate(healthy_history(30))]
    assert kinds(flat) == ["entropy_collapse"]
    learning = [replace(r, reward_mean=0.3 + 0.01 * i) for i, r in enumerate(flat)]
    assert kinds(learning) == []
    done = [replace(r, reward_mean=0.95) for r in flat]
    assert kinds(done) == []


@pytest.mark.parametrize("factor", [2.5, 0.4])
def test_length_drift_without_reward(factor: float) -> None:
    lengths = [7.0 * factor ** (i / 29) for i in range(30)]
    flat = [replace(r, reward_mean=0.5, entropy=0.5, response_tokens_mean=n) for r, n in zip(healthy_history(30), lengths, strict=True)]
    # the last window's mean is a little inside the last value
    assert kinds([*flat, *(replace(flat[-1], step=31 + i) for i in range(WINDOW))]) == ["length_drift"]
    rewarded = [replace(r, reward_mean=0.4 + 0.01 * i) for i, r in enumerate(flat)]
    assert kinds(rewarded) == [], "longer and better is learning"


def test_logprob_gap_at_once_when_large_and_when_it_grew() -> None:
    first = healthy_history(1)
    assert kinds([replace(first[0], logprob_gap_mean=0.06)]) == ["logprob_gap"]
    assert kinds([replace(first[0], logprob_gap_mean=0.01)]) == [], "two bf16 kernels differ by that"
    grown = healthy_history(20)
    grown[-1] = replace(grown[-1], logprob_gap_mean=0.004)
    assert kinds(grown) == ["logprob_gap"]


def test_abstentions() -> None:
    history = healthy_history(20)
    history[-1] = replace(history[-1], abstentions=200)  # of 5 * 512
    assert kinds(history) == ["abstentions"]
    history[-1] = replace(history[-1], abstentions=20)
    assert kinds(history) == []


def test_skipped_steps_come_on_and_go_off() -> None:
    history = healthy_history(20)
    history[10] = replace(history[10], skipped_steps=1, grad_norm=float("nan"))
    on = [step for step in range(1, 21) if kinds(history[:step])]
    assert on == list(range(11, 11 + WINDOW))
    assert kinds([replace(sft_record(1), skipped_steps=1)]) == ["skipped_steps"]


def test_every_alarm_says_what_why_and_what_to_do() -> None:
    sick = [
        replace(
            r,
            reward_mean=0.1,
            no_variance_share=1.0,
            truncated_share=1.0,
            entropy=1.0 if i < 5 else 0.0,
            response_tokens_mean=5.0 if i < 5 else 50.0,
            logprob_gap_mean=1.0,
            abstentions=512,
            skipped_steps=1,
        )
        for i, r in enumerate(healthy_history(30))
    ]
    found = alarms(sick)
    assert len(found) == 7
    assert all(alarm.what and alarm.cause and alarm.action for alarm in found)
    assert any(character.isdigit() for alarm in found for character in alarm.what)
