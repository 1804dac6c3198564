"""The driver's policy over real workers and ranks. Failure cases 13, 17, 21, 31, 46 and 58, on the path that a run takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drumroll.algorithms.loss import reinforce, rl_loss, token_weights
from drumroll.algorithms.presets import resolve
from drumroll.config import RunConfig, parse
from drumroll.engines.base import GenerateRequest, SamplingParams
from drumroll.errors import RunError
from drumroll.observe.metrics import update_facts
from drumroll.observe.timer import PhaseTimer
from drumroll.pipelines import rl
from drumroll.pipelines.evaluate import Evaluator
from drumroll.rewards.base import RewardSet
from drumroll.rollout.rollouter import Rollouter, assemble
from drumroll.rollout.samples import from_groups
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import Prompt, TrainSample
from tests.engine_models import VOCABULARY, make
from tests.scorer_models import alone

HERE = __file__
TEMPERATURE = 0.6
LOSS = partial(rl_loss, policy=reinforce, weights=token_weights("token_mean", 1))
TOTAL_STEPS = 10


def config(folder: Path, ranks: int = 2, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "max_steps": TOTAL_STEPS,
        "run_dir": "unused",
        "model": {"path": str(folder)},
        "data": {"train": {"task": "sort"}, "max_prompt_tokens": 96},
        "rollout": {"max_tokens": 12, "temperature": TEMPERATURE},
        "rewards": [{"fn": "exact"}],
        "algorithm": {"name": "grpo", "old_logprobs": "recompute"},
        "optim": {"lr": 1e-3, "warmup_steps": 4, "max_skips": 3},
        "train": {"micro_batch_tokens": 100},
        "backend": {"name": "fsdp2"},
        "engine": {"name": "transformers"},
        "runtime": {"ranks": ranks, "device": "cpu"},
    }
    return parse(tree | changes)


@contextmanager
def started(run: RunConfig, reference: bool = False) -> Iterator[Policy]:
    spec = WorkerSpec(run, Path(run.model.path), plan(run, reference))
    with launch(partial(Worker, spec=spec), run.runtime.ranks, "cpu", timeout_s=60) as ranks:
        policy = Policy(ranks, run, TOTAL_STEPS)
        policy.push()
        yield policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2", tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Policy]:
    """Two ranks; tests may train it, none may rely on fresh weights."""
    with started(config(folder)) as policy:
        yield policy


def samples(lengths: list[int], advantages: list[float] | None = None) -> list[TrainSample]:
    rng = np.random.default_rng(sum(lengths))
    made = []
    for index, (length, advantage) in enumerate(zip(lengths, advantages or [1.0] * len(lengths), strict=True)):
        mask = np.arange(length) >= length // 3
        ids = rng.integers(3, VOCABULARY, length)
        made.append(TrainSample(ids, mask, advantages=np.full(int(mask.sum()), advantage, np.float32), group_id=index))
    return made


def test_case_13_sampler_old_reference_and_training_are_one_distribution(folder: Path) -> None:
    """At temperature 0.6, before any update: gaps below 1e-5, ratio 1, KL 0; log-probs at temperature 1 would be off by more than 0.1."""
    run = config(folder, ranks=1)
    algorithm = resolve(run.algorithm, 12)  # type: ignore[arg-type]
    sampling = SamplingParams(12, temperature=TEMPERATURE)
    prompts = [Prompt(i, "", "", list(range(5, 8 + 3 * i)), {}) for i in range(6)]
    with started(run, reference=True) as policy:
        asked = [GenerateRequest(p.group_id, p.token_ids, 2, sampling) for p in prompts]
        groups = assemble(prompts, policy.generate(asked), 2)
        for rollout in (r for group in groups for r in group.rollouts):
            rollout.reward = 1.0
        scored = rl.score(from_groups(groups), policy, algorithm)
        for sample in scored:
            sample.advantages = np.ones(sample.n_targets, np.float32)
            assert sample.old_logprobs is not None and sample.engine_logprobs is not None and sample.ref_logprobs is not None
            np.testing.assert_allclose(sample.old_logprobs, sample.engine_logprobs, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(sample.old_logprobs, sample.ref_logprobs)
        step = policy.step(scored, algorithm.loss())
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    flat = torch.from_numpy(np.concatenate([sample.old_logprobs for sample in scored if sample.old_logprobs is not None]))
    assert (flat - alone(model, scored, TEMPERATURE)).abs().max() < 1e-5
    assert (flat - alone(model, scored, 1.0)).abs().max() > 0.1
    assert step.stats["ratio"].mean == step.stats["ratio"].max == 1.0
    assert step.stats["kl_ref"].max == step.stats["kl_old"].max == 0.0
    assert step.stats["logprob_gap"].max < 1e-5
    assert step.stats["clipped"].max == 0.0


def test_case_17_a_skipped_step_leaves_weights_and_schedule_and_three_in_a_row_end_the_run(policy: Policy) -> None:
    """One NaN advantage, so one rank's loss is NaN. The rate of the next step is that of the step that did not happen."""
    good, poisoned = samples([20, 18, 16, 14]), samples([20, 18, 16, 14], [1.0, 1.0, math.nan, 1.0])
    before, applied, rate = policy.logprobs("policy", good), policy.applied_steps, policy.next_learning_rate

    def unchanged() -> bool:
        now = policy.logprobs("policy", good)
        return (policy.applied_steps, policy.next_learning_rate) == (applied, rate) and all(map(np.array_equal, now, before))

    skips = [policy.step(poisoned, LOSS) for _ in range(2)]
    assert all(skip.skipped and skip.grad_norm == math.inf for skip in skips)
    assert update_facts(skips, rate).skipped_steps == policy.skips_in_a_row == 2
    assert unchanged()
    assert not policy.step(good, LOSS).skipped
    assert policy.skips_in_a_row == 0
    assert policy.applied_steps == applied + 1
    assert policy.next_learning_rate > rate  # the warm-up goes on
    before, applied, rate = policy.logprobs("policy", good), policy.applied_steps, policy.next_learning_rate
    for _ in range(2):
        policy.step(poisoned, LOSS)
    with pytest.raises(RunError, match=r"3 optimizer steps in a row \(optim.max_skips\): .*the loss is nan: the policy computes no"):
        policy.step(poisoned, LOSS)
    assert unchanged()
    policy.step(good, LOSS)


def test_case_21_both_end_ids_of_the_model_reach_the_sampler(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    GenerationConfig(eos_token_id=[8, 9]).save_pretrained(folder)
    with RewardSet(config(folder).rewards) as rewards:
        _, sampling = rl.open_prompts(config(folder), folder, rewards)
    assert sampling.eos_ids == (2, 8, 9)  # the tokenizer's, and the model's two


def row_index(rollout: object, prompt: Prompt) -> float:
    return float(prompt.columns["index"])


@pytest.mark.parametrize("rows", [200, 3, 1])
def test_case_31_every_evaluation_row_is_scored_once_on_two_ranks(policy: Policy, folder: Path, tmp_path: Path, rows: int) -> None:
    """Reward = row index, so the score is (rows - 1) / 2 exactly when none is dropped, doubled or over-weighted; one rank may have none."""
    file = tmp_path / "eval.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}", "answer": "{i}", "index": {i}}}\n' for i in range(rows)))
    fn = {"fn": f"{HERE}:row_index", "isolate": False}
    data = {"train": {"task": "sort"}, "eval": {"path": str(file)}}
    run = config(folder, data=data, rewards=[fn], rollout={"max_tokens": 1}, eval={"rows": 256})
    with RewardSet(run.rewards) as rewards:
        result, groups = Evaluator(run, folder, Rollouter(policy.generate, rewards, PhaseTimer())).run(0, policy.version)
    assert [group.prompt.columns["index"] for group in groups] == list(range(rows))
    assert all(len(group.rollouts) == 1 and group.prompt.stream == "eval" for group in groups)
    assert (result.rows, result.abstentions) == (rows, 0)
    assert result.score == (rows - 1) / 2


@pytest.mark.parametrize("lengths", [[50] * 5 + [20] * 5, [90, 80, 70], [40]], ids=["long and short", "one fills in", "one works"])
def test_case_58_ranks_with_different_work_pass_equally_often(folder: Path, lengths: list[int], tmp_path: Path) -> None:
    """Cap 100 tokens: log-prob and training passes end, and give what one process gives. (Ranks that wait for others would hang.)"""
    batch = samples(lengths, [(-1.0) ** i * (1 + i) for i in range(len(lengths))])
    found = []
    for ranks in (1, 2):
        with started(config(folder, ranks)) as policy:
            scores = policy.logprobs("policy", batch)
            found.append((scores, policy.step(batch, LOSS), policy.logprobs("policy", batch)))
    (one_before, one_step, one_after), (two_before, two_step, two_after) = found
    assert [len(score) for score in two_before] == [sample.n_targets for sample in batch]
    expected = alone(AutoModelForCausalLM.from_pretrained(folder).eval(), batch, TEMPERATURE).detach().numpy()
    np.testing.assert_allclose(np.concatenate(two_before), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(two_before), np.concatenate(one_before), rtol=0, atol=1e-5)
    assert two_step.grad_norm == pytest.approx(one_step.grad_norm, rel=1e-5)
    assert two_step.stats["loss"].sum == pytest.approx(one_step.stats["loss"].sum, rel=1e-5)
    assert two_step.stats["logprob"].count == sum(sample.n_targets for sample in batch)
    assert not np.array_equal(np.concatenate(two_after), np.concatenate(two_before))
    np.testing.assert_allclose(np.concatenate(two_after), np.concatenate(one_after), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "llama"], ids=["tied", "untied"])
def test_case_46_what_two_ranks_export_is_what_they_trained(family: str, tmp_path: Path) -> None:
    """Reloaded by transformers with nothing missing, tied or untied as it was, and with the live model's log-probs to 1e-5."""
    source, batch = make(family, tmp_path / "source"), samples([20, 17, 9])
    with started(config(source)) as policy:
        start = policy.logprobs("policy", batch)
        for _ in range(2):
            policy.step(batch, LOSS)
        live = torch.from_numpy(np.concatenate(policy.logprobs("policy", batch)))
        policy.export(tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (family == "qwen2")
    assert len(list(model.parameters())) == len(list(AutoModelForCausalLM.from_pretrained(source).parameters()))
    found = alone(model.eval(), batch, TEMPERATURE).detach()
    assert (found - live).abs().max() < 1e-5
    assert (found - torch.from_numpy(np.concatenate(start))).abs().max() > 1e-2
