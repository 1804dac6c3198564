"""Every backend against `single`, and `single` against transformers alone: outputs, loss, gradients, norm, weights after three steps.

Failure cases 1, 2, 5, 48, 49, 50 and 58 in their backend part; a case's number stands in the test that holds it.
"""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.errors import UserError
from drumroll.packing import denominators
from drumroll.types import Stat
from tests.contract import backend_runs as runs
from tests.contract.backend_runs import MODELS, Trained, relative
from tests.ranks import run_ranks

TOLERANCE = 1e-5
PASSES = (1, 2, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: runs.write_model(root / name, name.split("-")[0], name.endswith("-tied")) for name in MODELS}


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[Any, Trained]:
    found: dict[Any, Trained] = run_ranks(runs.train_all, 1, "single", {}, folders, PASSES)[0]
    return found


def test_single_equals_transformers_alone(single: dict[Any, Trained], folders: dict[str, Path]) -> None:
    """Also case 49: the gradient of a tied embedding is the sum of its two halves."""
    samples = runs.make_samples()
    for model in MODELS:
        gradients, loss, logprobs = runs.plain_gradients(folders[model], samples)
        found = single[model, 1]
        assert found.gradients.keys() == gradients.keys()
        assert max(relative(found.gradients[name], gradients[name]) for name in gradients) < TOLERANCE
        assert relative(found.logprobs[0], torch.cat(logprobs)) < 1e-6
        assert math.isclose(found.losses[0], loss, rel_tol=TOLERANCE)
        norm = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in gradients.values()))
        assert math.isclose(found.results[0].grad_norm, norm, rel_tol=1e-6)


def test_accumulation_does_not_matter(single: dict[Any, Trained]) -> None:
    """Case 2: the same samples in one, two or four micro-batches."""
    for model in MODELS:
        for passes in PASSES[1:]:
            assert_equal_training([single[model, passes]], single[model, 1], TOLERANCE)


SOME = ("llama-tied", "qwen3-untied")


@pytest.mark.parametrize(
    ("name", "options", "models"),
    [
        ("ddp", {}, SOME),
        ("zero1", {}, SOME),
        ("zero2", {}, SOME),
        ("zero2", {"grad_sync": "last", "bucket_mb": 0.01}, SOME),
        ("fsdp1", {}, MODELS),
        ("fsdp1", {"grad_sync": "last"}, SOME),
        ("fsdp2", {}, MODELS),
        ("fsdp2", {"grad_sync": "last", "reshard_after_forward": False}, SOME),
    ],
)
def test_one_rank_is_bit_equal_to_single(
    name: str, options: dict[str, Any], models: tuple[str, ...], folders: dict[str, Path], single: dict[Any, Trained]
) -> None:
    (found,) = run_ranks(runs.train_all, 1, name, options, {model: folders[model] for model in models}, PASSES)
    for key, mine in found.items():
        assert_bit_equal(mine, single[key])


@pytest.mark.parametrize(
    ("name", "options", "ranks", "models", "passes"),
    [
        ("ddp", {}, 2, MODELS, PASSES),
        ("fsdp2", {}, 2, MODELS, PASSES),
        ("ddp", {"grad_sync": "every", "bucket_mb": 0.01}, 2, SOME, (1, 4)),
        ("fsdp2", {"grad_sync": "last"}, 2, SOME, (1, 4)),
        ("fsdp2", {"reshard_after_forward": False}, 2, SOME, (2,)),
        ("fsdp2", {}, 4, SOME, (2,)),
        ("fsdp2", {"replicas": 2}, 4, SOME, (2,)),
        ("fsdp2", {"replicas": 2, "grad_sync": "last"}, 2, SOME, (2,)),
        ("fsdp2", {"reshard_after_forward": 2}, 4, SOME, (2,)),
        ("fsdp2", {"embeddings": "apart", "prefetch_forward": 2, "prefetch_backward": 2}, 2, MODELS, (2,)),
        ("fsdp2", {"wrap": ["LlamaMLP", "LlamaAttention"]}, 2, ("llama-tied",), (2,)),
        ("fsdp2", {"offload": True}, 2, SOME, (2,)),
        ("zero1", {}, 2, MODELS, PASSES),
        ("zero1", {"grad_sync": "every"}, 4, SOME, (2,)),
        ("zero2", {}, 2, MODELS, PASSES),
        ("zero2", {"grad_sync": "last", "bucket_mb": 0.01}, 2, SOME, (1, 4)),
        ("zero2", {"bucket_mb": 0.01}, 4, SOME, (2,)),
        ("fsdp1", {}, 2, MODELS, PASSES),
        ("fsdp1", {"grad_sync": "last"}, 2, SOME, (1, 4)),
        ("fsdp1", {"reshard_after_forward": False}, 2, SOME, (2,)),
        ("fsdp1", {"grad_sync": "last", "reshard_after_forward": False}, 4, SOME, (4,)),
        ("fsdp1", {}, 4, SOME, (2,)),
    ],
)
def test_ranks_equal_single(
    name: str,
    options: dict[str, Any],
    ranks: int,
    models: tuple[str, ...],
    passes: tuple[int, ...],
    folders: dict[str, Path],
    single: dict[Any, Trained],
) -> None:
    """Cases 1, 5 and 58: ranks with different numbers of target tokens, of real micro-batches, and one with none at all."""
    found = run_ranks(runs.train_all, ranks, name, options, {model: folders[model] for model in models}, passes)
    for key in found[0]:
        assert_equal_training([of_rank[key] for of_rank in found], single[key], TOLERANCE)
    if name not in ("ddp", "zero1") or options.get("grad_sync") != "every":
        # Nothing but exact zeros is added to rank 0's gradients, so not a bit may change. (A DDP that reduces what it has accumulated so
        # far together with what is new rounds once more.)
        for model in models:
            assert_bit_equal(found[0][model, "one rank works"], single[model, "one rank works"], norms=False)


def assert_equal_training(found: list[Trained], expected: Trained, tolerance: float) -> None:
    for rank in found:
        assert rank.gradients.keys() == expected.gradients.keys()
        assert rank.weights.keys() == expected.weights.keys()
        assert max(relative(rank.gradients[name], expected.gradients[name]) for name in expected.gradients) < tolerance
        assert max(relative(rank.weights[name], expected.weights[name]) for name in expected.weights) < tolerance
        assert rank.results == found[0].results
        assert all(type(result.grad_norm) is float for result in rank.results)  # case 16: not a DTensor, over any mesh
    for mine, theirs in zip(found[0].results, expected.results, strict=True):
        assert math.isclose(mine.grad_norm, theirs.grad_norm, rel_tol=tolerance)
        assert not mine.skipped
    assert sum(rank.losses[0] for rank in found) == pytest.approx(expected.losses[0], rel=tolerance)
    entropy = reduce(Stat.merge, (rank.entropy for rank in found))
    assert entropy.count == expected.entropy.count
    assert entropy.mean == pytest.approx(expected.entropy.mean, rel=tolerance)
    assert entropy.max == pytest.approx(expected.entropy.max, rel=tolerance)
    outputs = torch.cat([logprobs for rank in found for logprobs in rank.logprobs]).sort().values
    assert relative(outputs, torch.cat(expected.logprobs).sort().values) < tolerance


def assert_bit_equal(found: Trained, expected: Trained, norms: bool = True) -> None:
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True))
    assert all(torch.equal(found.gradients[name], expected.gradients[name]) for name in expected.gradients)
    assert found.losses[0] == expected.losses[0]
    if norms:  # the norm of rows is added up in another order than the norm of a whole, and clipping passes that on
        assert found.results == expected.results
        assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


def odd_cases(rank: int, ranks: int, name: str, root: Path) -> dict[str, Any]:
    """Cases 48 and 50, samples without targets, frozen parameters, checkpointing: on one spawn."""
    found: dict[str, Any] = {}
    unclipped = OptimSpec(max_grad_norm=0.0)
    for vocab in (5, 6):
        samples = runs.make_samples(4, vocab)
        backend: Any = runs.start(rank, ranks, name, {}, ModelSpec(str(root / f"vocab-{vocab}")), unclipped)
        found[f"vocab {vocab}"] = runs.train(backend, runs.one_rank_plan(samples, rank, ranks, 1), denominators(samples), steps=1)
        scorer = backend._scorer
        found[f"tied {vocab}"] = scorer.tied
        found[f"buffers {vocab}"] = {scorer.hf_name(key): buffer.clone() for key, buffer in scorer.named_buffers()}
    samples = runs.make_samples(4)
    plan = [samples] if rank == 0 else [runs.without_targets(2)]
    for key, spec in {
        "no targets": ModelSpec(str(root / "llama-tied")),
        "checkpointing": ModelSpec(str(root / "llama-tied"), checkpointing="full"),
        "frozen": ModelSpec(str(root / "llama-tied"), trainable=(r"layers\.1\.", "norm")),
    }.items():
        found[key] = runs.train(runs.start(rank, ranks, name, {}, spec, unclipped), plan, denominators(samples))
    return found


@pytest.fixture(scope="module")
def odd_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    for vocab in (5, 6):
        runs.write_model(root / f"vocab-{vocab}", "llama", tied=True, vocab=vocab)
    runs.write_model(root / "llama-tied", "llama", tied=True)
    return root


@pytest.fixture(scope="module")
def odd_single(odd_root: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(odd_cases, 1, "single", odd_root)[0]
    return found


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "fsdp1", "fsdp2"])
def test_odd_models_and_batches(name: str, odd_root: Path, odd_single: dict[str, Any]) -> None:
    for rank, found in enumerate(run_ranks(odd_cases, 2, name, odd_root)):
        for vocab in (5, 6):  # case 48: a tied embedding whose rows do not divide by the ranks
            start = AutoModelForCausalLM.from_pretrained(odd_root / f"vocab-{vocab}")
            weights, expected = found[f"vocab {vocab}"].weights, odd_single[f"vocab {vocab}"].weights
            assert found[f"tied {vocab}"]
            assert all(torch.equal(weights[key], expected[key]) for key in expected)
            assert (weights["model.embed_tokens.weight"] != start.model.embed_tokens.weight).any(dim=1).all()
            buffers = dict(start.named_buffers())  # case 50: RoPE's inv_freq is in no file
            assert found[f"buffers {vocab}"].keys() == buffers.keys()
            assert all(torch.equal(found[f"buffers {vocab}"][key], buffer) for key, buffer in buffers.items())
            assert all(found[f"buffers {vocab}"][key].dtype == buffer.dtype for key, buffer in buffers.items())
        # case 5: samples without a target weigh nothing, and their rank reports a finite zero
        if rank == 1:
            assert found["no targets"].losses == [0.0, 0.0, 0.0]
        for key in ("no targets", "checkpointing", "frozen"):
            mine, theirs = found[key], odd_single[key]
            assert mine.gradients.keys() == theirs.gradients.keys()
            assert all(torch.equal(mine.gradients[name], theirs.gradients[name]) for name in theirs.gradients)
            assert all(torch.equal(mine.weights[name], theirs.weights[name]) for name in theirs.weights)
        assert len(found["frozen"].gradients) < len(found["no targets"].gradients)
        assert torch.equal(found["frozen"].weights["model.embed_tokens.weight"], load(odd_root, "model.embed_tokens.weight"))
        assert all(torch.equal(found["checkpointing"].weights[name], tensor) for name, tensor in found["no targets"].weights.items())


def load(root: Path, name: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(root / "llama-tied").get_parameter(name).detach()


def six_tokens(rank: int, ranks: int, name: str, folder: Path) -> dict[str, torch.Tensor]:
    long, short = runs.make_samples(2)
    long.target_mask[:] = short.target_mask[:] = False
    long.target_mask[1:6] = True
    short.target_mask[-1] = True
    long.advantages, short.advantages = np.ones(5, np.float32), -np.ones(1, np.float32) / 2
    backend = runs.start(rank, ranks, name, {}, ModelSpec(str(folder)), OptimSpec())
    plan = [[long, short]] if ranks == 1 else [[(long, short)[rank]]]
    return runs.train(backend, plan, denominators([long, short]), steps=1).gradients


def test_six_tokens_split_five_to_one(folders: dict[str, Path]) -> None:
    """Case 1, to the tolerance it names."""
    (expected,) = run_ranks(six_tokens, 1, "single", folders["llama-untied"])
    for name in ("ddp", "zero1", "zero2", "fsdp1", "fsdp2"):
        for found in run_ranks(six_tokens, 2, name, folders["llama-untied"]):
            assert max(relative(found[key], expected[key]) for key in expected) < 1e-6


def refuse(rank: int, ranks: int, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        runs.start(rank, ranks, "single", {}, ModelSpec(str(folder)), None)
    return str(caught.value)


def test_single_refuses_more_ranks(folders: dict[str, Path]) -> None:
    assert all("runtime.ranks=2" in message for message in run_ranks(refuse, 2, folders["llama-tied"]))
