"""Folders that keep the experts of a layer apart: which tensors make up a parameter, reading parts of it, refusing what is rearranged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Auto
from transformers import PreTrainedModel, core_model_loading

from drumroll.backends.base import ModelSpec
from drumroll.errors import UserError
from drumroll.models.build import build, materialise
from drumroll.models.fused import FileTensor, file_tensors
from drumroll.models.stream import Held, load
from tests import scorer_models as models


def on_meta(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = Auto.from_config(models.CONFIGS[name], dtype=torch.float32)
    return model


def shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", list(models.CONFIGS))
def test_the_tensors_of_a_saved_folder_are_named_and_placed(name: str, tmp_path: Path) -> None:
    """For every family: put together, what transformers wrote is what it holds, bit for bit."""
    stored = load_file(models.make(name, tmp_path / name) / "model.safetensors")
    reference = models.reference(tmp_path / name)
    apart = file_tensors(on_meta(name), shapes(reference))
    assert sorted(tensor.name for tensors in apart.values() for tensor in tensors) == sorted(stored)
    for key, parameter in reference.named_parameters():
        assert torch.equal(torch.cat([stored[tensor.name].flatten() for tensor in apart[key]]), parameter.flatten()), key
        for tensor in apart[key]:
            assert torch.equal(tensor.of(parameter), stored[tensor.name]), tensor.name


def test_experts_in_order() -> None:
    apart = file_tensors(on_meta("qwen3-moe"), shapes(on_meta("qwen3-moe")))
    tensors = apart["model.layers.0.mlp.experts.gate_up_proj"]
    first = [(tensor.name.split("experts.")[1], tuple(tensor.shape), tensor.start) for tensor in tensors]
    assert first[:3] == [
        ("0.gate_proj.weight", (24, 32), 0),
        ("0.up_proj.weight", (24, 32), 24 * 32),
        ("1.gate_proj.weight", (24, 32), 2 * 24 * 32),
    ]
    assert len(first) == 2 * 6


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_parts_are_read_by_range(name: str, ranks: int, tmp_path: Path) -> None:
    """Ranges that begin and end anywhere, within a tensor or over several, put together are the parameter."""
    folder = models.make(name, tmp_path / name)
    whole = dict(models.reference(folder).named_parameters())
    found: dict[str, list[torch.Tensor]] = {key: [] for key in whole}
    for rank in range(ranks):
        scorer = build(ModelSpec(str(folder)))
        materialise(scorer, torch.device("cpu"))
        held = {}
        for key, parameter in scorer.hf.named_parameters():
            first, last = (parameter.numel() * at // ranks for at in (rank, rank + 1))
            held[parameter] = Held(torch.full((last - first,), float("nan")), first, parameter.shape)
            found[key].append(held[parameter].local)
        load(scorer, folder, held.__getitem__)
    for key, parts in found.items():
        assert torch.equal(torch.cat(parts), whole[key].flatten()), key


def test_a_folder_may_hold_them_fused(tmp_path: Path) -> None:
    model = models.reference(models.make("qwen3-moe", tmp_path / "apart"))
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "fused" / "model.safetensors")
    for got, want in zip(models.scorer(tmp_path / "fused").parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = models.make("qwen3-moe", tmp_path / "moe")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"experts\.3\.up_proj\.weight' has shape \(24, 31\); the model of config.json has \(24, 32\)"):
        models.scorer(folder)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight; unexpected none"):
        models.scorer(folder)


def test_other_arrangements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose files hold the transposed experts: named, not read wrongly."""
    conversion = [
        core_model_loading.WeightConverter("experts.down_proj", "experts.down_proj", operations=[core_model_loading.Transpose(1, 2)])
    ]
    model = on_meta("qwen3-moe")
    monkeypatch.setattr(model, "_weight_conversions", conversion, raising=False)
    with pytest.raises(UserError, match=r"experts\.down_proj of a model folder is .* rearranged"):
        file_tensors(model, shapes(model))


def test_a_view_of_the_values() -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(FileTensor("x", torch.Size([3, 4]), 12).of(whole), whole[1])
