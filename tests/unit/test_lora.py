"""Which layers are adapted, how adapters are named and begin, what they add to a weight, and what a recipe and a folder may say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from drumroll.backends.base import LoraSpec, ModelSpec
from drumroll.config import parse
from drumroll.errors import UserError
from drumroll.models import build, lora
from drumroll.models.scorer import Scorer
from tests.scorer_models import CONFIGS, make

peft = pytest.importorskip("peft")

RECIPE = {"max_steps": 1, "run_dir": "x", "pipeline": "sft", "data": {"train": {"task": "sort"}}, "backend": {"name": "single"}}


def injected(folder: Path, **fields: Any) -> Scorer:
    return build.build(ModelSpec(str(folder), lora=LoraSpec(rank=4, alpha=8.0, **fields)), meta=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2-tied", tmp_path_factory.mktemp("qwen2"))


def test_names_are_those_of_the_model_and_of_peft_files(folder: Path) -> None:
    scorer = injected(folder, targets=("q_proj",))
    names = [Scorer.hf_name(name) for name, _ in scorer.named_parameters()]
    plain = [name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()]
    layer = "model.layers.1.self_attn.q_proj"
    assert [name for name in names if ".lora_" not in name] == plain
    assert {f"{layer}.weight", f"{layer}.bias", f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"} <= set(names)
    assert len(names) == len(set(names)) == len(plain) + 4


def test_adapters_alone_train_and_are_float32_over_any_base(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        spec = ModelSpec(str(folder), compute_dtype=dtype, lora=LoraSpec(base_dtype=dtype))
        for meta in (True, False):
            for name, parameter in build.build(spec, meta=meta).named_parameters():
                assert parameter.requires_grad == (".lora_" in name)
                assert parameter.dtype is (torch.float32 if ".lora_" in name else dtype)
                assert parameter.is_meta == meta


def test_targets_are_ends_of_names_and_all_linear_leaves_out_the_head(folder: Path) -> None:
    def adapted(*targets: str) -> list[str]:
        return sorted(adapter.layer for adapter in lora.adapters(injected(folder, targets=targets).hf))

    linear = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", *(f"self_attn.{kind}_proj" for kind in "koqv")]
    assert adapted() == [f"model.layers.{index}.{name}" for index in (0, 1) for name in linear]
    assert adapted("self_attn.q_proj") == adapted("q_proj") == [f"model.layers.{index}.self_attn.q_proj" for index in (0, 1)]
    assert adapted("layers.1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "mlp", "proj", "c_attn", "layers.7.mlp.up_proj"])
def test_a_target_that_is_no_linear_layer_of_a_block_is_refused(folder: Path, target: str) -> None:
    with pytest.raises(UserError, match=f"is a '{target}'; they are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        injected(folder, targets=("q_proj", target))


def test_a_mixture_with_dense_layers_says_which_targets_experts_lack(tmp_path: Path) -> None:
    """By the names of the dense layers PEFT would adapt experts too."""
    config = CONFIGS["qwen3-moe"].to_diff_dict() | {"mlp_only_layers": [0]}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapts model\.layers\.1\.mlp\.experts too.*e\.g\. \[q_proj"):
        injected(tmp_path)
    injected(tmp_path, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def test_a_beginning_depends_on_seed_and_name_alone() -> None:
    shape = torch.Size((4, 32))
    first = lora.initial("a.lora_A.weight", shape, 1)
    torch.manual_seed(7)
    assert torch.equal(first, lora.initial("a.lora_A.weight", shape, 1))
    assert not torch.equal(first, lora.initial("b.lora_A.weight", shape, 1))
    assert not torch.equal(first, lora.initial("a.lora_A.weight", shape, 2))
    wide = lora.initial("a.lora_A.weight", torch.Size((64, 400)), 1)
    assert float(wide.abs().max()) <= 0.05  # uniform within 1 / sqrt(400): mean 0, variance bound² / 3
    assert abs(float(wide.mean())) < 1e-3
    assert float(wide.var()) == pytest.approx(0.05**2 / 3, rel=0.03)
    assert not lora.initial("a.lora_B.weight", torch.Size((32, 4)), 1).any()


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_what_is_added_to_a_weight_is_what_peft_adds(name: str, tmp_path: Path) -> None:
    """Whole and in rows; GPT-2's layers keep their weight transposed."""
    hf = injected(make(name, tmp_path)).hf
    for parameter in hf.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    assert len(lora.adapters(hf)) == {"qwen2-tied": 14, "gpt2": 8}[name]
    for adapter in lora.adapters(hf):
        layer: Any = hf.get_submodule(adapter.layer)
        assert adapter.transposed == (name == "gpt2")
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected, rows = layer.get_delta_weight("default"), len(layer.base_layer.weight)
        assert expected.shape == layer.base_layer.weight.shape
        torch.testing.assert_close(adapter.delta(a, b, 0, rows), expected)
        parts = [adapter.delta(a, b, first, last) for first, last in ((0, 5), (5, 5), (5, rows))]
        torch.testing.assert_close(torch.cat(parts), expected)


def test_switched_off_is_the_base_and_what_trains_comes_back(folder: Path) -> None:
    hf = injected(folder).hf
    for parameter in hf.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    hf.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight").requires_grad_(False)
    flags = [parameter.requires_grad for parameter in hf.parameters()]
    ids = torch.arange(3, 11)[None]
    adapted = hf(input_ids=ids).logits
    with lora.switched_off(hf):
        bare = hf(input_ids=ids).logits
    assert [parameter.requires_grad for parameter in hf.parameters()] == flags
    assert torch.equal(hf(input_ids=ids).logits, adapted)
    state = {Scorer.hf_name(name): tensor for name, tensor in hf.state_dict().items() if ".lora_" not in name}
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.load_state_dict(state)
    assert torch.equal(plain(input_ids=ids).logits, bare)
    assert (adapted - bare).abs().max() > 0.1


def test_a_folder_comes_back_and_one_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=8.0, targets=("q_proj",))
    hf = injected(folder, targets=("q_proj",)).hf
    tensors = {lora.outer_name(name): torch.randn_like(p) for name, p in hf.named_parameters() if p.requires_grad}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    lora.write_folder(tmp_path, spec, str(folder), tensors)
    found = lora.read_folder(tmp_path, spec, shapes)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 8, ["q_proj"])
    for other, fault in (
        (LoraSpec(rank=8, alpha=8.0), "'r': 4"),
        (LoraSpec(rank=4, alpha=4.0), "'lora_alpha': 8"),
    ):
        with pytest.raises(UserError, match=fault):
            lora.read_folder(tmp_path, other, shapes)
    with pytest.raises(UserError, match=r"1 names are not those of model.lora.targets, first x.lora_A.weight, missing in the file"):
        lora.read_folder(tmp_path, spec, {**shapes, "x.lora_A.weight": torch.Size((4, 32))})
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(UserError, match="'use_dora': True"):
        lora.read_folder(tmp_path, spec, shapes)
    with pytest.raises(UserError, match=r"expected a PEFT adapter, adapter_config.json and adapter_model.safetensors"):
        lora.read_folder(tmp_path / "nowhere", spec, shapes)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ({"lora": {"dropout": 0.1}}, "model.lora.dropout: 0.1: expected 0"),
        ({"lora": {"base_dtype": "4bit"}}, "model.lora.base_dtype: '4bit': expected float32 or bfloat16: a quantised base"),
        ({"lora": {"targets": "q_proj"}}, "Input should be 'all-linear', got 'q_proj'"),
        ({"lora": {"targets": []}}, "at least 1 item"),
        ({"lora": {"r": 8}}, "unknown key 'model.lora.r'"),
        ({"lora": {}, "trainable": ["norm"]}, "leave out `trainable`, or `lora`"),
    ],
)
def test_a_recipe_that_asks_for_what_is_not_there_is_refused(model: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**RECIPE, "model": {"path": "m", **model}})
    assert fault in str(caught.value)


def test_defaults_of_a_recipe(folder: Path) -> None:
    found = parse({**RECIPE, "model": {"path": "m", "lora": {"dropout": 0}}}).model.lora
    assert found is not None
    assert (found.rank, found.alpha, found.targets, found.base_dtype, found.start) == (16, 32.0, "all-linear", "float32", None)


def test_without_peft_the_way_to_install_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"model.lora needs PEFT.*\[lora\]"):
        injected(folder)
