"""Step records as a healthy run leaves them; tests spoil one thing at a time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from drumroll.observe.metrics import StepRecord, eval_record
from drumroll.observe.summary import Summary, summarise
from drumroll.types import Group, Prompt, Rollout


def healthy_record(step: int, seed: int = 0) -> StepRecord:
    """Step `step` of a run like the quickstart: reward 0.4 -> 0.9 in 60 steps, entropy down to a tenth, ever more solved groups."""
    noise = random.Random(seed * 100_003 + step)
    solved = 0.4 + 0.55 * (1 - math.exp(-step / 20))
    return StepRecord(
        phase="rl",
        step=step,
        time=1_700_000_000.0 + step,
        version=step - 1,
        tokens_digest=f"{step:016x}",
        loss=noise.gauss(0, 1e-3),
        loss_abs=0.4,
        grad_norm=0.5 + 0.1 * noise.random(),
        lr=3e-4 * min(1.0, step / 10),
        optimizer_steps=1,
        skipped_steps=0,
        train_tokens=3584,
        logprob_mean=-0.3 * (1 - solved),
        entropy=0.8 * (1 - solved),
        kl_old=0.0,
        clip_share=0.0,
        advantage_abs_mean=0.8,
        logprob_gap_mean=2e-7,
        logprob_gap_max=4e-6,
        logprob_gap_share=0.0,
        reward_mean=solved + noise.gauss(0, 0.02),
        reward_std=0.4,
        reward_min=0.0,
        reward_max=1.0,
        rewards={"exact": solved},
        groups=64,
        rollouts=512,
        tokens=4096,
        no_variance_share=min(1.0, solved**8 + 0.3 * solved),
        abstentions=0,
        prompt_tokens_mean=8.0,
        response_tokens_mean=7.0 + noise.gauss(0, 0.05),
        response_tokens_max=9,
        truncated_share=0.02,
        seconds_generate=1.0,
        seconds_reward=0.1,
        seconds_train=1.5,
        seconds_sync=0.1,
        seconds_total=2.8,
        tokens_per_second=1463.0,
        peak_bytes=600 << 20,
    )


def healthy_history(steps: int = 60, seed: int = 0) -> list[StepRecord]:
    return [healthy_record(step, seed) for step in range(1, steps + 1)]


def sft_record(step: int) -> StepRecord:
    return StepRecord(
        phase="sft",
        step=step,
        version=0,
        tokens_digest="0" * 16,
        loss=2.0 / step,
        loss_abs=2.0 / step,
        grad_norm=1.0,
        lr=1e-3,
        optimizer_steps=1,
        skipped_steps=0,
        train_tokens=900,
        logprob_mean=-2.0 / step,
        seconds_train=0.09,
        seconds_total=0.1,
    )


def group(rewards: list[float | None], *, group_id: int = 0, lengths: list[int] | None = None, text: str = "12", cut: int = 0) -> Group:
    """A group with one rollout a reward; the first `cut` of them were cut by the limit."""
    sizes = lengths or [2] * len(rewards)
    rollouts = [
        Rollout(
            index=i,
            token_ids=list(range(sizes[i])),
            logprobs=[-0.5] * sizes[i],
            version=3,
            finish_reason="length" if i < cut else "stop",
            text=text,
            reward=reward,
            breakdown={"exact": reward},
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(Prompt(group_id, f"sort:0:{group_id}", "21=", [2, 1, 9], {"answer": "12"}), rollouts)


def finished(**changes: object) -> Summary:
    """The summary of a run of two RL steps whose gaps were 1e-7 and 2e-7."""
    evals = [eval_record(step=s, version=s, groups=[group([score])], seconds=1.0) for s, score in ((0, 0.25), (1, 0.5), (2, 0.75))]
    records = [sft_record(1), *(replace(r, logprob_gap_mean=1e-7 * r.step, skipped_steps=r.step - 1) for r in healthy_history(2))]
    summary = summarise(
        status="completed",
        records=records,
        evals=evals,
        weight_pushes=3,
        digests_matched=3,
        wall_seconds=12.5,
        peak_bytes_per_rank=[10, 20],
    )
    return replace(summary, **changes)  # type: ignore[arg-type]
