"""What is decided before a run starts: how many optimizer steps the schedule is laid over, and which SFT run a warm-up is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drumroll import config, plugins
from drumroll.algorithms.presets import resolve
from drumroll.algorithms.schedule import learning_rate
from drumroll.pipelines.rl import total_optimizer_steps
from drumroll.pipelines.warmup import warmup_config
from drumroll.rollout.samples import minibatches
from drumroll.types import TrainSample


def rl_run(**changes: Any) -> config.RunConfig:
    tree: dict[str, Any] = {
        "max_steps": 5,
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": {"task": "sort"}, "eval": {"task": "sort", "seed": 1}},
        "rewards": [{"fn": "exact"}],
        "backend": {"name": plugins.SPECIFICATION_BACKEND},
        "engine": {"name": plugins.EMBEDDED_ENGINE},
        "algorithm": {"name": "grpo"},
    }
    return config.parse(tree | changes)


@pytest.mark.parametrize(
    ("prompts", "k", "epochs", "total"), [(3, 16, 1, 15), (3, 16, 2, 30), (16, 16, 1, 80), (40, 4, 3, 60), (1, 8, 1, 5)]
)
def test_the_schedule_ends_where_the_run_does(prompts: int, k: int, epochs: int, total: int) -> None:
    run = rl_run(
        rollout={"prompts_per_step": prompts},
        algorithm={"name": "grpo", "minibatches": k, "epochs": epochs},
        optim={"lr": 1.0, "schedule": "linear", "min_lr_ratio": 0.25},
    )
    assert run.algorithm is not None
    algorithm = resolve(run.algorithm, run.rollout.max_tokens)
    samples = [TrainSample(np.arange(3), np.array([False, True, True]), group_id=group) for group in range(prompts) for _ in range(2)]
    done = run.max_steps * algorithm.epochs * len(minibatches(samples, algorithm.minibatches))
    assert total_optimizer_steps(run, algorithm) == done == total
    assert learning_rate(run.optim, done, total) == 0.25
    assert learning_rate(run.optim, done - 1, total) > 0.25


def test_a_warm_up_takes_from_the_recipe_only_what_sft_reads() -> None:
    """So that it is refused for no key, and its place in the cache depends on none that does not matter."""
    rollout = {"max_tokens": 8, "temperature": 0.5, "prompts_per_step": 4}
    hot = rl_run(warmup={"steps": 7}, rollout=rollout, data={"train": {"task": "sort"}})
    cold = rl_run(warmup={"steps": 7}, rollout={"max_tokens": 8})
    assert isinstance(hot.warmup, config.WarmupConfig) and isinstance(cold.warmup, config.WarmupConfig)
    assert warmup_config(hot, hot.warmup) == warmup_config(cold, cold.warmup)
    other = config.WarmupConfig(steps=7, data=config.TaskSource(task="larger"))
    assert warmup_config(cold, other).data.train == other.data
