"""How experts are computed; how evenly routers use them, against transformers one sample at a time; the loss that weighs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot
from transformers import AutoModelForCausalLM as Auto
from transformers import PreTrainedModel, Qwen3MoeConfig

from drumroll.algorithms.loss import balanced, sft_loss
from drumroll.backends.base import ModelSpec
from drumroll.engines.base import EngineSpec, GenerateRequest, SamplingParams
from drumroll.engines.transformers import Config as EngineConfig
from drumroll.engines.transformers import TransformersEngine
from drumroll.errors import RunError, UserError
from drumroll.models.build import build
from drumroll.models.builtin import tokenizer
from drumroll.models.experts import balance
from drumroll.models.layout import lay_out, owners
from drumroll.packing import collate, denominators
from drumroll.types import TokenOutputs, TrainSample
from tests import scorer_models as models

MODELS = ("qwen3-moe", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: models.make(name, root / name) for name in (*MODELS, "llama")}


def alone(model: PreTrainedModel, sample: TrainSample) -> torch.Tensor:
    """Equations 17 to 20 of arXiv 2412.19437, spelled out for one sequence, without alpha; the mean over layers."""
    logits = model(input_ids=torch.from_numpy(sample.token_ids)[None, :-1], output_router_logits=True, use_cache=False).router_logits
    layers = []
    for logits_TE in logits:
        tokens, experts = logits_TE.shape
        affinity_TE = logits_TE.softmax(-1)  # already sums to 1
        chosen_TK = affinity_TE.topk(model.config.num_experts_per_tok).indices
        f_E = experts / (chosen_TK.shape[1] * tokens) * one_hot(chosen_TK, experts).sum((0, 1))
        p_E = affinity_TE.sum(0) / tokens
        layers.append((f_E * p_E).sum())
    return torch.stack(layers).mean()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "computing",
    [{}, {"layout": "packed"}, {"checkpointing": "full"}, {"checkpointing": "selective"}, {"tile_mlp": 5, "checkpointing": "full"}],
    ids=str,
)
def test_balance_and_its_gradient_equal_transformers_one_sample_at_a_time(
    folders: dict[str, Path], name: str, computing: dict[str, Any]
) -> None:
    batch, reference, scorer = models.samples(), models.reference(folders[name]), models.scorer(folders[name], balance=True, **computing)
    expected = torch.stack([alone(reference, sample) for sample in batch])
    *_, found = scorer(collate(batch))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (expected > 1.05).all()  # uneven, so that the numbers say something
    expected.sum().backward()
    found.sum().backward()
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            got = scorer.hf.get_parameter(key).grad
            assert (got - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), key


def test_compiled_blocks_give_it_too(folders: dict[str, Path]) -> None:
    batch = models.samples()
    plain, compiled = (models.scorer(folders["qwen3-moe"], balance=True, compile=how) for how in (False, True))
    found = [scorer(collate(batch))[2] for scorer in (plain, compiled)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "dtype", "kernel"), [(24, torch.float32, "grouped_mm"), (22, torch.float32, "eager"), (12, torch.bfloat16, "eager")], ids=str
)
def test_sizes_that_grouped_matmuls_do_not_take(width: int, dtype: torch.dtype, kernel: str, tmp_path: Path) -> None:
    """Rows of 88 or 24 bytes: computed expert by expert, in training and in the sampler, equal to transformers' own loop."""
    config = Qwen3MoeConfig(**{**models.CONFIGS["qwen3-moe"].to_diff_dict(), "moe_intermediate_size": width})
    torch.manual_seed(0)
    Auto.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    scorer, batch = models.scorer(tmp_path, compute_dtype=dtype), models.samples()
    assert scorer.hf.config._experts_implementation == kernel
    logprobs, *_ = scorer(collate(batch))
    logprobs.sum().backward()
    if dtype == torch.float32:
        loop = Auto.from_pretrained(tmp_path, experts_implementation="eager").eval()
        torch.testing.assert_close(logprobs, models.alone(loop, batch), rtol=0, atol=1e-5)
    engine = TransformersEngine(EngineConfig())
    engine.start(EngineSpec(path=str(tmp_path), dtype=dtype, device=torch.device("cpu"), seed=0, max_length=32))
    assert len(list(engine.generate([GenerateRequest(0, [1, 5], 2, SamplingParams(4))]))) == 2
    engine.close()


def test_bounds(folders: dict[str, Path]) -> None:
    """Even routing gives 1, routing of everything to the same K of E experts with certainty E / K, whatever the lengths."""
    hf = build(ModelSpec(str(folders["qwen3-moe"]))).hf  # 2 of 6 experts
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 2])  # the last one is padding
    even, same = torch.zeros(10, 6), torch.zeros(10, 6)
    for token in range(10):
        even[token, [2 * token % 6, (2 * token + 1) % 6]] = 1e-4
    same[:, :2] = 1e4
    same[9] = float("nan")  # what padding computes does not matter
    torch.testing.assert_close(balance(hf, [even], owner, 2), torch.ones(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(balance(hf, [even, even], owner, 2), torch.ones(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(balance(hf, [same], owner, 2), torch.full((2,), 3.0))


def test_without_a_target_it_is_zero_and_attached(folders: dict[str, Path]) -> None:
    scorer = models.scorer(folders["qwen3-moe"], balance=True)
    for batch in ([], [TrainSample(np.arange(1, 6), np.zeros(5, bool))]):
        *_, found = scorer(collate(batch))
        assert found.tolist() == [0.0] * len(batch)
        assert found.requires_grad


def test_it_is_measured_where_it_trains_only(folders: dict[str, Path]) -> None:
    with torch.no_grad():
        assert models.scorer(folders["qwen3-moe"], balance=True)(collate(models.samples()))[2] is None
    assert models.scorer(folders["qwen3-moe"])(collate(models.samples()))[2] is None


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_owners_are_those_of_the_inputs(layout: Any) -> None:
    """Tokens of a sample that names it: each input belongs to the sample whose token it is, or is a copy behind the row's end."""
    batch = [TrainSample(np.full(length, index), np.arange(length) > 0) for index, length in enumerate((4, 1, 7, 2))]
    owner, ids = owners(collate(batch), layout), lay_out(collate(batch), layout).input_ids_BL.flatten()
    assert owner.shape == ids.shape
    assert torch.equal(owner[owner < 4], ids[owner < 4])
    assert torch.bincount(owner, minlength=5)[:4].tolist() == [3, 0, 6, 1]
    assert (owner == 4).any() == (layout == "rows")


def test_the_loss_is_a_mean_over_sequences_with_a_target() -> None:
    masks = (np.arange(4) > 1, np.zeros(5, bool), np.arange(3) > 1)
    batch = [TrainSample(np.arange(len(mask)), mask) for mask in masks]
    logprobs, router = torch.tensor([-1.0, -2.0, -6.0]), torch.tensor([1.5, 100.0, 2.5], requires_grad=True)
    outputs = TokenOutputs(logprobs, balance=router)
    found = balanced(outputs, collate(batch), denominators(batch), loss=sft_loss, coef=0.1)
    assert float(found.loss.detach()) == pytest.approx(9 / 3 + 0.1 * (1.5 + 2.5) / 2)
    assert found.stats["router_balance"].tolist() == [1.5, 2.5]
    found.loss.backward()
    torch.testing.assert_close(router.grad, torch.tensor([0.05, 0.0, 0.05]))
    with pytest.raises(RunError, match=r"the routers' balance"):
        balanced(TokenOutputs(logprobs), collate(batch), denominators(batch), loss=sft_loss, coef=0.1)


def test_a_model_without_experts_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"train\.router_aux_coef: LlamaForCausalLM is no mixture of experts"):
        build(ModelSpec(str(folders["llama"]), balance=True))
