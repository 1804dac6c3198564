"""Value heads on every backend against `single`, and `single` against autograd over transformers' own body."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from drumroll.algorithms.value import value_loss
from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.errors import RunError
from drumroll.models import value
from drumroll.packing import collate, denominators
from drumroll.types import TrainSample
from tests.contract import backend_runs as runs
from tests.contract.backend_runs import relative
from tests.ranks import run_ranks

LOSS = partial(value_loss, clip=0.2)
SHARDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {}), ("zero1", {}), ("zero2", {"bucket_mb": 0.01}), ("fsdp1", {}), ("fsdp2", {}), ("fsdp2", {"embeddings": "apart"}),
    ("fsdp2", {"sequence_ranks": 2}),
)  # fmt: skip


def make_samples() -> list[TrainSample]:
    """Old values and returns beside the tokens: errors within the clip and beyond it."""
    rng = np.random.default_rng(5)
    made = runs.make_samples()
    for sample in made:
        sample.values = rng.normal(0, 0.2, sample.n_targets).astype(np.float32)
        sample.returns = rng.normal(0, 1, sample.n_targets).astype(np.float32)
    return made


def train(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path, scratch: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Values, three steps with the first one's gradients, weights, a checkpoint, and the step after it; rank 0 of several has no sample."""
    samples = make_samples()
    spec, optim = ModelSpec(str(folder), head="value", compute_dtype=dtype), OptimSpec(weight_decay=0.01)
    workers = max(1, ranks - 1)
    plan = [[]] * 2 if ranks > 1 and rank == 0 else runs.even_plan(samples, max(0, rank - 1), workers, 2)
    micros, counts = [collate(part) if part else collate([]) for part in plan], denominators(samples)
    backend = runs.start(rank, ranks, name, options, spec, optim)
    found: dict[str, Any] = {"values": torch.cat([backend.values(micro) for micro in micros]), "norms": []}
    with pytest.raises(RunError, match="this backend instance has a value head"):
        backend.logprobs(micros[0])
    for step in range(3):
        for index, micro in enumerate(micros):
            backend.forward_backward(micro, LOSS, counts, last=index == len(micros) - 1)
        if step == 0:
            found["gradients"] = {key: gradient.clone() for key, gradient in backend.gradients()}
            found["memory"] = backend.memory()
        if step == 2:
            backend.save(scratch)  # before the last step
            found["digests"] = backend.digests(torch.float32)
        found["norms"].append(backend.step(runs.LR).grad_norm)
    found["weights"] = runs.full_weights(backend)
    backend.close()
    return found


def adopt(rank: int, ranks: int, cases: list[tuple[str, dict[str, Any]]], folder: Path, scratch: Path) -> list[bool]:
    """Whether each backend holds, after loading a checkpoint of `single`, bit for bit what was saved."""
    same = []
    for name, options in cases:
        backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), head="value"), OptimSpec(weight_decay=0.01))
        backend.load(scratch)
        same.append(backend.digests(torch.float32))
        backend.close()
    return same


def train_all(rank: int, ranks: int, cases: list[tuple[str, dict[str, Any]]], folder: Path, scratch: Path, dtype: torch.dtype) -> list[Any]:
    return [train(rank, ranks, name, options, folder, scratch / str(index), dtype) for index, (name, options) in enumerate(cases)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("values")
    runs.write_model(root / "model", "qwen3", tied=True)
    return root


@pytest.fixture(scope="module")
def single(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(train_all, 1, [("single", {})], root / "model", root / "single", torch.float32)[0][0]
    return found


def test_single_is_autograd_over_the_plain_body(single: dict[str, Any], root: Path) -> None:
    """Gradients of the body by its names, and of the head, to 1e-5; the LM head is not held, though the file is of a tied model."""
    body = AutoModel.from_pretrained(root / "model", dtype=torch.float32).eval()
    head = value.initial(torch.Size([1, 32])).requires_grad_()
    samples, total = make_samples(), torch.zeros(())
    for sample in samples:
        assert sample.values is not None and sample.returns is not None
        hidden_TH = body(input_ids=torch.from_numpy(sample.token_ids)[None], use_cache=False).last_hidden_state[0]
        now = (hidden_TH[:-1] @ head[0])[torch.from_numpy(sample.target_mask[1:])]
        old, returns = torch.from_numpy(sample.values), torch.from_numpy(sample.returns)
        bound = torch.maximum(torch.minimum(now, old + 0.2), old - 0.2)
        total = total + 0.5 * torch.maximum((now - returns) ** 2, (bound - returns) ** 2).sum()
    (total / denominators(samples).tokens).backward()
    assert head.grad is not None
    expected = {f"model.{name}": parameter.grad for name, parameter in body.named_parameters()} | {value.WEIGHT: head.grad}
    assert single["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert relative(single["gradients"][name], gradient) < 1e-5, name


def test_ranks_equal_single(single: dict[str, Any], root: Path) -> None:
    """Outputs, gradients, norms and weights of all backends on two ranks, one of which has no sample, to 1e-5; the head's one row too."""
    found = run_ranks(train_all, 2, list(SHARDED), root / "model", root / "two", torch.float32)
    for index, (name, options) in enumerate(SHARDED):
        first, second = found[0][index], found[1][index]
        case = f"{name} {options}"
        assert relative(torch.cat([first["values"], second["values"]]), single["values"]) < 1e-5, case
        for kind in ("gradients", "weights"):
            assert first[kind].keys() == single[kind].keys(), case
            for key, tensor in single[kind].items():
                assert relative(first[kind][key], tensor) < 1e-5, f"{case} {kind} {key}"
                assert torch.equal(first[kind][key], second[kind][key]), f"{case} {kind} {key}"
        for mine, theirs in zip(first["norms"], single["norms"], strict=True):
            assert math.isclose(mine, theirs, rel_tol=1e-5), case
        sizes = [rank["memory"]["parameter"] for rank in (first, second)]
        whole = single["memory"]["parameter"]
        if name.startswith("fsdp"):
            assert sum(sizes) < 1.05 * whole, f"{case}: {sizes} of {whole}"


def test_a_checkpoint_of_single_goes_to_every_backend(single: dict[str, Any], root: Path) -> None:
    """Bit for bit, on two ranks."""
    for of_rank in run_ranks(adopt, 2, list(SHARDED[:5]), root / "model", root / "single" / "0"):
        assert all(digests == single["digests"] for digests in of_rank)


def test_in_bfloat16_values_are_float32_and_alike(root: Path) -> None:
    cases = [("ddp", {}), ("fsdp2", {})]
    found = run_ranks(train_all, 2, cases, root / "model", root / "low", torch.bfloat16)
    one = run_ranks(train_all, 1, [("single", {})], root / "model", root / "low-single", torch.bfloat16)[0][0]
    for index in range(len(cases)):
        values = torch.cat([found[rank][index]["values"] for rank in range(2)])
        assert values.dtype is torch.float32
        assert relative(values, one["values"]) < 2e-2
        for name, gradient in one["gradients"].items():
            assert relative(found[0][index]["gradients"][name], gradient) < 5e-2, name


def refuse(rank: int, ranks: int, folder: Path) -> None:
    backend = runs.start(rank, ranks, "single", {}, ModelSpec(str(folder)), None)
    with pytest.raises(RunError, match="this backend instance has a language-model head"):
        backend.values(collate(runs.make_samples()))


def test_a_language_model_has_no_values(root: Path) -> None:
    run_ranks(refuse, 1, root / "model")
