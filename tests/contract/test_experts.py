"""Mixtures of experts on every backend, against transformers and torch alone: three steps, the routers' balance, experts without a token.

Failure cases 1, 2, 5, 46, 51 and 58 where experts change what they mean; a case's number stands in the test that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM as Auto
from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from drumroll.algorithms.loss import balanced, reinforce, rl_loss, token_weights
from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.config import RunConfig, parse
from drumroll.engines.base import GenerateRequest, SamplingParams
from drumroll.packing import collate, denominators
from drumroll.rollout.rollouter import assemble
from drumroll.rollout.samples import from_groups
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import Prompt, Stat, TrainSample
from tests.contract import backend_runs as runs
from tests.contract.backend_runs import Trained, relative
from tests.engine_models import make
from tests.ranks import run_ranks
from tests.scorer_models import alone

TOLERANCE = 1e-5
COEF = 0.3
LOSS = partial(balanced, loss=runs.loss_fn, coef=COEF)
OPTIM = OptimSpec(weight_decay=0.01, eps=1e-4)  # Adam divides by what an expert with one token hardly has: see tests of LoRA
_SHAPE: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.1,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SHAPE, intermediate_size=40, head_dim=8, moe_intermediate_size=24, num_experts=7, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=True, mlp_only_layers=[1],
    ),
    "mixtral": lambda: MixtralConfig(**_SHAPE, intermediate_size=40, num_local_experts=4),
    "many": lambda: Qwen3MoeConfig(
        **_SHAPE, intermediate_size=40, head_dim=8, moe_intermediate_size=8, num_experts=64, num_experts_per_tok=2, norm_topk_prob=True
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of 7, 4 and 64 experts: no multiple of the ranks, one, and more than there are tokens. The first has a layer without any."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for name, config in CONFIGS.items():
        torch.manual_seed(7)
        Auto.from_config(config(), dtype=torch.float32).save_pretrained(root / name)
        found[name] = root / name
    return found


PLANS = {
    "1": partial(runs.even_plan, passes=1),
    "2": partial(runs.even_plan, passes=2),
    "4": partial(runs.even_plan, passes=4),
    "one rank works": partial(runs.one_rank_plan, passes=2),
}


def train(
    rank: int, ranks: int, name: str, options: dict[str, Any], folders: dict[str, Path], plans: Sequence[str], computing: dict[str, Any]
) -> dict[tuple[str, str], Trained]:
    """(model, plan) -> three steps with a loss that weighs the routers' balance too; one sample has no target."""
    samples = [*runs.make_samples(), *runs.without_targets(1)]
    found = {}
    for model, folder in folders.items():
        for how in plans:
            backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), balance=True, **computing), OPTIM)
            found[model, how] = runs.train(backend, PLANS[how](samples, rank, ranks), denominators(samples), loss=LOSS)
    return found


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[tuple[str, str], Trained]:
    found: dict[tuple[str, str], Trained] = run_ranks(train, 1, "single", {}, folders, list(PLANS), {})[0]
    return found


def plain_training(folder: Path, samples: Sequence[TrainSample], steps: int = 3) -> Trained:
    """What a loop over transformers and torch.optim alone gives, one unpadded sample at a time; the balance as in arXiv 2412.19437."""
    model = Auto.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=runs.LR, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay)
    counts, found = denominators(samples), Trained(logprobs=[])
    for step in range(steps):
        total = 0.0
        for sample in samples:
            ids, mask = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.target_mask)
            out = model(input_ids=ids[None, :-1], output_router_logits=True, use_cache=False)
            log_p = out.logits[0].log_softmax(-1)
            chosen = log_p.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
            entropy = -(log_p.exp() * log_p).sum(-1)[mask[1:]]
            loss = (-(torch.from_numpy(sample.advantages) + 1.0) * chosen - 0.1 * entropy).sum() / counts.tokens
            uneven = torch.stack([_balance(logits, model.config.num_experts_per_tok) for logits in out.router_logits])
            (loss + COEF * uneven.mean() / counts.sequences).backward()
            total += float(loss.detach()) + COEF * float(uneven.mean().detach()) / counts.sequences
        found.losses.append(total)
        if step == 0:
            found.gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    found.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def _balance(logits_TE: torch.Tensor, chosen: int) -> torch.Tensor:
    p_TE, experts = logits_TE.softmax(-1), logits_TE.shape[1]
    hits_E = one_hot(p_TE.topk(chosen).indices, experts).sum((0, 1))
    return (experts / (chosen * len(p_TE)) * hits_E * p_TE.mean(0)).sum()


@pytest.mark.parametrize("model", list(CONFIGS))
def test_single_trains_as_transformers_does_alone(model: str, single: dict[Any, Trained], folders: dict[str, Path]) -> None:
    found, expected = single[model, "1"], plain_training(folders[model], runs.make_samples())
    assert found.gradients.keys() == expected.gradients.keys() == found.weights.keys()
    assert max(relative(found.gradients[name], gradient) for name, gradient in expected.gradients.items()) < TOLERANCE
    assert max(relative(found.weights[name], weight) for name, weight in expected.weights.items()) < TOLERANCE
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def test_case_2_the_division_into_micro_batches_does_not_matter(single: dict[Any, Trained], folders: dict[str, Path]) -> None:
    """Of the balance too, which a product of means over a micro-batch's tokens would fail."""
    for model in folders:
        for how in PLANS:
            assert_equal([single[model, how]], single[model, "1"])


@pytest.mark.parametrize(
    ("name", "options", "ranks", "plans", "computing"),
    [
        ("ddp", {}, 2, list(PLANS), {}),
        ("zero1", {}, 2, ["2", "one rank works"], {}),
        ("zero2", {"bucket_mb": 0.01}, 2, ["2", "one rank works"], {}),
        ("fsdp1", {}, 2, ["2", "one rank works"], {}),
        ("fsdp2", {}, 2, list(PLANS), {}),
        ("fsdp2", {"grad_sync": "last", "reshard_after_forward": False}, 2, ["4"], {}),
        ("fsdp2", {}, 4, ["2"], {}),
        ("fsdp2", {}, 2, ["2", "one rank works"], {"checkpointing": "full"}),
        ("fsdp2", {}, 2, ["2"], {"checkpointing": "selective", "tile_mlp": 16}),
    ],
    ids=str,
)
def test_ranks_equal_single(
    name: str,
    options: dict[str, Any],
    ranks: int,
    plans: list[str],
    computing: dict[str, Any],
    folders: dict[str, Path],
    single: dict[Any, Trained],
) -> None:
    """Cases 1, 5 and 58, with the routers' balance in the loss; "one rank works": the others have no token for any expert."""
    found = run_ranks(train, ranks, name, options, folders, plans, computing, timeout=240)
    for key in found[0]:
        assert_equal([of_rank[key] for of_rank in found], single[key])


def one_gradient(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path, compiled: bool) -> dict[str, torch.Tensor]:
    samples = runs.make_samples()
    backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), balance=True, compile=compiled), OPTIM)
    backend.forward_backward(collate(samples[rank::ranks]), LOSS, denominators(samples), last=True)
    return {name: gradient.clone() for name, gradient in backend.gradients()}


def test_compiled_blocks(tmp_path: Path) -> None:
    """The experts are called between their graphs: here those that ranks share, which are units of their own inside a compiled block."""
    torch.manual_seed(7)
    one_layer = MixtralConfig(**(_SHAPE | {"num_hidden_layers": 1}), intermediate_size=40, num_local_experts=4)
    Auto.from_config(one_layer).save_pretrained(tmp_path)
    (expected,) = run_ranks(one_gradient, 1, "single", {}, tmp_path, False)
    for found in run_ranks(one_gradient, 2, "fsdp2", {"expert_ranks": 2}, tmp_path, True, timeout=240):
        assert max(relative(found[name], gradient) for name, gradient in expected.items()) < TOLERANCE


def assert_equal(found: list[Trained], expected: Trained) -> None:
    for rank in found:
        assert rank.gradients.keys() == expected.gradients.keys()
        assert max(relative(rank.gradients[name], gradient) for name, gradient in expected.gradients.items()) < TOLERANCE
        assert max(relative(rank.weights[name], weight) for name, weight in expected.weights.items()) < TOLERANCE
        assert rank.results == found[0].results
    for mine, theirs in zip(found[0].results, expected.results, strict=True):
        assert math.isclose(mine.grad_norm, theirs.grad_norm, rel_tol=TOLERANCE)
    assert sum(rank.losses[0] for rank in found) == pytest.approx(expected.losses[0], rel=TOLERANCE)
    entropy = reduce(Stat.merge, (rank.entropy for rank in found))
    assert entropy.mean == pytest.approx(expected.entropy.mean, rel=TOLERANCE)


# Experts that no token of the step chose


def few_tokens(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path) -> Trained:
    """One step on five tokens, all of them rank 0's, of a model with 64 experts."""
    samples = [TrainSample(np.arange(3, 9), np.arange(6) > 2, advantages=np.ones(3, np.float32))]
    backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder)), OptimSpec())
    return runs.train(backend, [samples if rank == 0 else []], denominators(samples), steps=1)


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)])
def test_experts_without_a_token_have_zero_gradients_and_stay(name: str, ranks: int, folders: dict[str, Path]) -> None:
    """Not a hang, not an absent gradient: at most 10 of 64 experts are chosen, the others' weights keep every bit."""
    start = dict(Auto.from_pretrained(folders["many"]).named_parameters())
    for found in run_ranks(few_tokens, ranks, name, {}, folders["many"]):
        for layer in (0, 1):
            key = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            hit = found.gradients[key].flatten(1).any(1)
            assert 2 <= int(hit.sum()) <= 10
            for kind in ("gate_up_proj", "down_proj"):
                key = f"model.layers.{layer}.mlp.experts.{kind}"
                assert not found.gradients[key][~hit].any()
                assert torch.equal(found.weights[key][~hit], start[key].detach()[~hit])
                assert not torch.equal(found.weights[key][hit], start[key].detach()[hit])


# The path that a run takes


def run_config(folder: Path, coef: float) -> RunConfig:
    return parse(
        {
            "max_steps": 10,
            "run_dir": "unused",
            "model": {"path": str(folder)},
            "data": {"train": {"task": "sort"}, "max_prompt_tokens": 96},
            "rollout": {"max_tokens": 12},
            "rewards": [{"fn": "exact"}],
            "algorithm": {"name": "grpo"},
            "optim": {"lr": 1e-3},
            "train": {"micro_batch_tokens": 100, "router_aux_coef": coef},
            "backend": {"name": "fsdp2", "fsdp2": {"expert_ranks": 2}},
            "engine": {"name": "transformers"},
            "runtime": {"ranks": 2, "device": "cpu"},
        }
    )


def engine_gap(policy: Policy) -> float:
    """Largest difference of the log-probs of sampled tokens between engine and trainer."""
    asked = [GenerateRequest(i, list(range(5, 12 + i)), 4, SamplingParams(24)) for i in range(8)]
    prompts = [Prompt(i, "", "", request.token_ids, {}) for i, request in enumerate(asked)]
    groups = assemble(prompts, policy.generate(asked), 4)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward = 1.0
    samples = from_groups(groups)
    scores = policy.logprobs("policy", samples)
    return max(float(np.abs(mine - sample.engine_logprobs).max()) for mine, sample in zip(scores, samples, strict=True))


def test_a_run_pushes_samples_measures_balance_and_exports(tmp_path: Path) -> None:
    """Cases 46 and 51, of experts that ranks share: digests are compared at a push, the sampler follows, transformers reads the export."""
    folder, coef = make("qwen3-moe", tmp_path / "source"), 0.5
    batch = runs.make_samples(6, vocab=60)
    loss = partial(rl_loss, policy=reinforce, weights=token_weights("token_mean", 1))
    run = run_config(folder, coef)
    spec = WorkerSpec(run, Path(run.model.path), plan(run, reference=False))
    with launch(partial(Worker, spec=spec), run.runtime.ranks, "cpu", timeout_s=60) as ranks:
        policy = Policy(ranks, run, 10)
        first = policy.push()
        assert engine_gap(policy) < 1e-5
        steps = [policy.step(batch, loss).stats["router_balance"] for _ in range(4)]
        stale = engine_gap(policy)
        second = policy.push()
        assert engine_gap(policy) < 1e-5 < 1e-2 < stale
        live = torch.from_numpy(np.concatenate(policy.logprobs("policy", batch)))
        policy.export(tmp_path / "out")
    assert [stat.count for stat in steps] == [6] * 4
    assert 1 < steps[-1].mean < steps[0].mean < 4  # it is in the loss: 4 = 8 experts, 2 a token
    names = [name for name, _ in Auto.from_pretrained(folder).named_parameters()]
    assert first.matched == second.matched == len(names)
    loaded: Any = Auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source, out = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {name: tensor.shape for name, tensor in out.items()} == {name: tensor.shape for name, tensor in source.items()}
    assert (alone(model.eval(), batch) - live).abs().max() < 1e-5
