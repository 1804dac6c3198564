"""Experts shared by consecutive ranks (`backend.fsdp2.expert_ranks`), against `single`: three steps, checkpoints, what is refused.

Failure cases 1, 5, 46, 47 and 58 where experts lie apart; a case's number stands in the test that holds it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

from drumroll.backends import state
from drumroll.backends.base import KINDS, LoraSpec, ModelSpec, OptimSpec
from drumroll.digest import digest
from drumroll.errors import UserError
from drumroll.packing import denominators
from tests.contract import backend_runs as runs
from tests.contract import test_experts as plain
from tests.contract.backend_runs import Trained
from tests.contract.test_experts import OPTIM, assert_equal
from tests.ranks import run_ranks

QWEN, MIXTRAL = "qwen3-moe", "mixtral"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of 12 and 4 experts; the first has a layer without any."""
    root, found = tmp_path_factory.mktemp("models"), {}
    configs = {
        QWEN: Qwen3MoeConfig(
            **plain._SHAPE, intermediate_size=40, head_dim=8, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3,
            norm_topk_prob=True, tie_word_embeddings=True, mlp_only_layers=[1],
        ),
        MIXTRAL: MixtralConfig(**plain._SHAPE, intermediate_size=40, num_local_experts=4),
    }  # fmt: skip
    for name, config in configs.items():
        torch.manual_seed(7)
        Auto.from_config(config, dtype=torch.float32).save_pretrained(root / name)
        found[name] = root / name
    return found


PLANS = ["2", "one rank works"]


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[tuple[str, str], Trained]:
    found: dict[tuple[str, str], Trained] = run_ranks(plain.train, 1, "single", {}, folders, PLANS, {})[0]
    return found


@pytest.mark.parametrize(
    ("ranks", "options", "computing"),
    [
        (2, {"expert_ranks": 2, "grad_sync": "last", "reshard_after_forward": False, "offload": True}, {"checkpointing": "full"}),
        (4, {"expert_ranks": 4}, {"checkpointing": "selective"}),
        (4, {"expert_ranks": 2, "embeddings": "apart", "prefetch_forward": 1, "reshard_after_forward": 2}, {}),
        (4, {"expert_ranks": 2, "replicas": 2}, {}),
    ],
    ids=str,
)
def test_ranks_equal_single(
    ranks: int, options: dict[str, Any], computing: dict[str, Any], folders: dict[str, Path], single: dict[Any, Trained]
) -> None:
    """Cases 1, 5 and 58, with the routers' balance in the loss; "one rank works": the others have no token, but experts that compute."""
    found = run_ranks(plain.train, ranks, "fsdp2", options, folders, PLANS, computing, timeout=240)
    for key in found[0]:
        assert_equal([of_rank[key] for of_rank in found], single[key])


# In other company


COMPANY: dict[str, tuple[dict[str, Any], dict[str, Any], OptimSpec]] = {
    "sequence_ranks": ({"sequence_ranks": 2}, {}, OPTIM),
    "muon": ({}, {}, replace(OPTIM, name="muon")),
    "adafactor": ({}, {}, replace(OPTIM, name="adafactor")),
    "adapters": ({}, {"lora": LoraSpec(rank=4, targets=("q_proj", "o_proj"))}, OPTIM),
    "experts alone train": ({}, {"trainable": (r"\.experts\.",)}, OPTIM),
    "experts do not train": ({}, {"trainable": (r"^(?!.*\.experts\.)",)}, OPTIM),
}


def in_company(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path) -> dict[str, Trained]:
    samples, found = [*runs.make_samples(), *runs.without_targets(1)], {}
    for company, (more, computing, optim) in COMPANY.items():
        merged = {**options, **more} if options else {}
        backend = runs.start(rank, ranks, name, merged, ModelSpec(str(folder), **computing), optim)
        found[company] = runs.train(backend, runs.even_plan(samples, rank, ranks, 2), denominators(samples))
    return found


def test_other_options_optimizers_and_what_trains(folders: dict[str, Path]) -> None:
    """Adapted, experts are left as they are; with `sequence_ranks` every rank routes its slice of the tokens."""
    (expected,) = run_ranks(in_company, 1, "single", {}, folders[QWEN], timeout=100)
    found = run_ranks(in_company, 2, "fsdp2", {"expert_ranks": 2}, folders[QWEN], timeout=200)
    for company in COMPANY:
        assert_equal([of_rank[company] for of_rank in found], expected[company])


# What a rank holds, sends away and saves


def saved(rank: int, ranks: int, options: dict[str, Any], folder: Path, source: Path | None, target: Path) -> dict[str, int]:
    """Two steps, or what `source` has, are saved; bytes held. Sleep changes nothing, digests are those of what is sent to an engine."""
    samples = runs.make_samples()
    backend = runs.start(rank, ranks, "fsdp2", options, ModelSpec(str(folder)), OPTIM)
    if source is None:
        runs.train(backend, runs.even_plan(samples, rank, ranks, 1), denominators(samples), steps=2)
    else:
        backend.load(source)
    held = backend.memory()
    backend.sleep(KINDS)
    assert not any(backend.memory()[kind] for kind in KINDS)
    backend.wake()
    assert backend.memory() == held
    backend.save_async(target).result()
    for dtype in (torch.float32, torch.bfloat16):
        sent = {name: digest(tensor) for name, tensor in runs.full_weights(backend, dtype).items()}
        assert backend.digests(dtype) == sent
    return held


def test_case_47_a_checkpoint_does_not_know_who_held_which_expert(tmp_path: Path) -> None:
    """Saved by 2 x 2 ranks, which have 2 or 1 of 6 experts, gone through 2 ranks that share none and 2 that do: the same bits."""
    folder = tmp_path / "model"
    torch.manual_seed(7)
    Auto.from_config(MixtralConfig(**plain._SHAPE, intermediate_size=40, num_local_experts=6), dtype=torch.float32).save_pretrained(folder)
    shared, plain_ranks, again = (tmp_path / name for name in ("shared", "plain", "again"))
    held = run_ranks(saved, 4, {"expert_ranks": 2}, folder, None, shared)
    run_ranks(saved, 2, {}, folder, shared, plain_ranks)
    run_ranks(saved, 2, {"expert_ranks": 2}, folder, plain_ranks, again)
    first, second, third = (state.read(path) for path in (shared, plain_ranks, again))
    assert first.keys() == second.keys() == third.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) and torch.equal(tensor, third[name]), name
    shapes = {name: p.shape for name, p in Auto.from_pretrained(folder).named_parameters()}
    experts = sum(shape.numel() for name, shape in shapes.items() if ".experts." in name)
    others = sum(shape.numel() for shape in shapes.values()) - experts
    assert max(of_rank["parameter"] for of_rank in held) == pytest.approx(4 * (experts / 3 + others / 4), rel=0.03)


def test_experts_without_a_token_have_zero_gradients_and_stay(tmp_path: Path) -> None:
    """Five tokens on 64 experts of two ranks: one may get none, and does not hang."""
    torch.manual_seed(7)
    Auto.from_config(plain.CONFIGS["many"]()).save_pretrained(tmp_path)
    start = dict(Auto.from_pretrained(tmp_path).named_parameters())
    for found in run_ranks(plain.few_tokens, 2, "fsdp2", {"expert_ranks": 2}, tmp_path):
        for layer in (0, 1):
            key = f"model.layers.{layer}.mlp.experts.down_proj"
            hit = found.gradients[key].flatten(1).any(1)
            assert 2 <= int(hit.sum()) <= 10
            assert torch.equal(found.weights[key][~hit], start[key].detach()[~hit])
            assert not torch.equal(found.weights[key][hit], start[key].detach()[hit])


# What is refused


Refused = tuple[dict[str, Any], str, dict[str, Any], str]  # options, model, how it computes, what is said
REFUSED: dict[int, list[Refused]] = {
    2: [
        ({"expert_ranks": 2}, "llama", {}, "expert_ranks=2: LlamaForCausalLM has no experts"),
        ({"expert_ranks": 2}, "odd", {}, "no multiple of 16 bytes"),
        ({"expert_ranks": 2}, MIXTRAL, {"tile_mlp": 16}, "set model.tile_mlp=0"),
    ],
    3: [
        ({"expert_ranks": 3}, MIXTRAL, {}, "expert_ranks=3 does not divide the 4 experts of MixtralForCausalLM"),
        ({"expert_ranks": 2}, MIXTRAL, {}, "expert_ranks=2 does not divide the 3 ranks"),
    ],
}


def refusals(rank: int, ranks: int, folders: dict[str, Path]) -> list[str]:
    said = []
    for options, model, computing, _ in REFUSED[ranks]:
        with pytest.raises(UserError) as caught:
            runs.start(rank, ranks, "fsdp2", options, ModelSpec(str(folders[model]), **computing), None)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("ranks", list(REFUSED))
def test_what_cannot_be_is_refused_with_a_reason(ranks: int, folders: dict[str, Path], tmp_path: Path) -> None:
    others = {
        "odd": MixtralConfig(**plain._SHAPE, intermediate_size=41, num_local_experts=6),
        "llama": LlamaConfig(**plain._SHAPE, intermediate_size=40),
    }
    for name, config in others.items():
        Auto.from_config(config).save_pretrained(tmp_path / name)
    for said in run_ranks(refusals, ranks, folders | {name: tmp_path / name for name in others}):
        for text, (_, _, _, expected) in zip(said, REFUSED[ranks], strict=True):
            assert expected in text
