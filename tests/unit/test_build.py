"""Building on the meta device: ties, buffers, what trains, precision, checkpointing. Failure cases 49 and 50."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM as Auto
from transformers import BertConfig

from drumroll.backends.base import ModelSpec
from drumroll.errors import RunError, UserError
from drumroll.models import build as module
from drumroll.models.blocks import tile_mlp
from drumroll.models.build import build, materialise, parameter_names
from drumroll.packing import collate
from tests import scorer_models as models

BUFFERS = ["llama", "qwen2-tied", "qwen3-tied", "llama-llama3", "qwen3-yarn", "phi3-long", "gemma3", "gpt2", "opt"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: models.make(name, root / name) for name in models.CONFIGS}


def test_nothing_has_memory_before_materialise(folders: dict[str, Path]) -> None:
    scorer = build(ModelSpec(str(folders["llama"])))
    assert all(tensor.is_meta for tensor in [*scorer.parameters(), *scorer.buffers()])
    assert {parameter.dtype for parameter in scorer.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", BUFFERS)
def test_every_parameter_and_buffer_equals_the_reference(folders: dict[str, Path], name: str) -> None:
    """Failure case 50: values, dtypes and names of all buffers, persistent or not."""
    scorer, reference = models.scorer(folders[name]), models.reference(folders[name])
    for kind in ("named_parameters", "named_buffers"):
        got, want = dict(getattr(scorer.hf, kind)()), dict(getattr(reference, kind)())
        assert got.keys() == want.keys()
        for key in want:
            assert got[key].dtype == want[key].dtype, key
            assert torch.equal(got[key], want[key]), key


@pytest.mark.parametrize("name", BUFFERS)
def test_logprobs_equal_transformers(folders: dict[str, Path], name: str) -> None:
    batch = models.samples()
    logprobs, entropy, _ = models.scorer(folders[name])(collate(batch), True)
    torch.testing.assert_close(logprobs, models.alone(models.reference(folders[name]), batch), rtol=0, atol=1e-5)
    assert entropy is not None
    assert ((entropy > 0) & (entropy <= torch.tensor(models.VOCAB).log() + 1e-5)).all()


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_ties_survive_and_the_gradient_has_both_halves(folders: dict[str, Path], name: str) -> None:
    """Failure case 49: an untied embedding gets only its input half, and the loss does not tell."""
    scorer, reference, batch = models.scorer(folders[name]), models.reference(folders[name]), models.samples()
    assert scorer.tied
    assert scorer.head.weight is scorer.hf.get_input_embeddings().weight
    assert [len(names) for names in parameter_names(scorer.hf).values()].count(2) == 1
    scorer(collate(batch))[0].sum().backward()
    models.alone(reference, batch).sum().backward()
    got, want = scorer.head.weight.grad, reference.get_input_embeddings().weight.grad
    assert (got - want).norm() < 1e-5 * want.norm()
    assert not models.scorer(folders["llama"]).tied


def test_a_buffer_that_nobody_rebuilds_is_an_error(folders: dict[str, Path]) -> None:
    scorer = build(ModelSpec(str(folders["llama"])))
    scorer.hf.base_model.register_buffer("forgotten", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(RunError, match=r"model\.forgotten"):
        materialise(scorer, torch.device("cpu"))


def test_a_tie_that_comes_apart_is_an_error(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = build(ModelSpec(str(folders["qwen2-tied"])))

    def untie(hf: nn.Module) -> None:
        hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.clone())

    monkeypatch.setattr(module, "_rebuild_buffers", untie)
    with pytest.raises(RunError, match=r"embed_tokens\.weight.*lm_head\.weight"):
        materialise(scorer, torch.device("cpu"))


def test_trainable_patterns_select_by_hf_name(folders: dict[str, Path]) -> None:
    hf = build(ModelSpec(str(folders["llama"]), trainable=(r"layers\.1\.", "lm_head"))).hf
    training = {name for name, parameter in hf.named_parameters() if parameter.requires_grad}
    assert training == {name for name, _ in hf.named_parameters() if "layers.1." in name or "lm_head" in name}
    tied = build(ModelSpec(str(folders["qwen2-tied"]), trainable=("lm_head",))).hf  # a tie answers to both of its names
    assert [name for name, parameter in tied.named_parameters() if parameter.requires_grad] == ["model.embed_tokens.weight"]


def test_a_trainable_pattern_without_match_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"'layer\\.1' matches no parameter.*model\.embed_tokens\.weight"):
        build(ModelSpec(str(folders["llama"]), trainable=(r"layers\.1", r"layer\.1")))


def test_models_that_change_their_logits_are_refused_by_field(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="final_logit_softcapping=30"):
        build(ModelSpec(str(folders["gemma2"])))


def test_an_unknown_attention_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="attention='spda'"):
        build(ModelSpec(str(folders["llama"]), attention="spda"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        build(ModelSpec(str(tmp_path)))


def test_dropout_is_off_whatever_mode_is_asked_for(folders: dict[str, Path]) -> None:
    scorer = models.scorer(folders["gpt2"])
    assert scorer.hf.config.resid_pdrop > 0
    scorer.train()
    micro = collate(models.samples())
    assert torch.equal(scorer(micro)[0], scorer(micro)[0])


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gpt2", "mixtral"])
def test_lower_compute_dtype_equals_a_model_cast_as_a_whole(folders: dict[str, Path], name: str) -> None:
    batch = models.samples((9, 9))
    scorer, whole = models.scorer(folders[name], compute_dtype=torch.bfloat16), Auto.from_pretrained(folders[name], dtype=torch.bfloat16)
    logprobs, *_ = scorer(collate(batch))
    ids = torch.stack([torch.from_numpy(sample.token_ids) for sample in batch])[:, :-1]
    expected = _targets(whole(input_ids=ids, use_cache=False).logits, batch)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)  # a RoPE buffer cast with the rest would be 1e-3 off
    logprobs.sum().backward()
    assert {parameter.grad.dtype for parameter in scorer.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in scorer.parameters()} == {torch.float32}


def _targets(logits_BLV: torch.Tensor, batch: list) -> torch.Tensor:  # type: ignore[type-arg]
    log_p = logits_BLV.float().log_softmax(-1)
    ids = torch.stack([torch.from_numpy(sample.token_ids[1:]) for sample in batch])
    mask = torch.stack([torch.from_numpy(sample.target_mask[1:]) for sample in batch])
    return log_p.gather(2, ids[..., None]).squeeze(2)[mask]


@pytest.mark.parametrize("checkpointing", ["full", "selective", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "gpt2", "gemma3", "qwen3-moe"])
def test_checkpointing_changes_no_bit_of_outputs_or_gradients(
    folders: dict[str, Path], name: str, dtype: torch.dtype, checkpointing: str
) -> None:
    micro = collate(models.samples())
    plain, saving = (models.scorer(folders[name], compute_dtype=dtype, checkpointing=how) for how in ("none", checkpointing))
    for scorer in (plain, saving):
        logprobs, entropy, _ = scorer(micro, True)
        (logprobs.sum() + entropy.sum()).backward()
        scorer.outputs = logprobs.detach()
    assert torch.equal(plain.outputs, saving.outputs)
    for (key, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key


def test_checkpointing_keeps_fewer_activations_and_reaches_parameters_behind_frozen_ones(folders: dict[str, Path]) -> None:
    """Failure case 53's trap: with the embedding frozen, re-entrant checkpointing would leave every gradient None."""
    micro, kept = collate(models.samples()), {}
    for how in ("none", "full", "selective", "offload"):
        scorer = models.scorer(folders["llama"], checkpointing=how, trainable=("layers",))
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs, *_ = scorer(micro)
        logprobs.sum().backward()
        kept[how] = sum(saved)
        for name, parameter in scorer.named_parameters():
            assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["offload"] < kept["full"]  # the blocks' inputs went to host memory through a hook of their own


def test_a_compiled_block_computes_the_same(folders: dict[str, Path]) -> None:
    micro = collate(models.samples())
    found = []
    for compiled in (False, True):
        scorer = models.scorer(folders["llama"], compile=compiled, checkpointing="full")
        logprobs, entropy, _ = scorer(micro, True)
        (logprobs.sum() + entropy.sum()).backward()
        found.append((logprobs.detach(), {name: parameter.grad for name, parameter in scorer.named_parameters()}))
    (plain, gradients), (compiled_logprobs, compiled_gradients) = found
    torch.testing.assert_close(compiled_logprobs, plain, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert float((compiled_gradients[name] - gradient).norm() / gradient.norm()) < 1e-5, name


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_a_tiled_mlp_computes_the_same_and_keeps_less(folders: dict[str, Path], name: str) -> None:
    micro, found, kept = collate(models.samples()), [], []
    for tokens in (0, 5):
        scorer = models.scorer(folders[name], tile_mlp=tokens)
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs, entropy, _ = scorer(micro, True)
        (logprobs.sum() + entropy.sum()).backward()
        found.append((logprobs.detach(), {key: parameter.grad for key, parameter in scorer.named_parameters()}))
        kept.append(sum(saved))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)
    for key, gradient in found[0][1].items():
        assert float((found[1][1][key] - gradient).norm() / gradient.norm()) < 1e-5, key
    assert kept[1] < 0.8 * kept[0]


def test_a_block_without_an_mlp_cannot_be_tiled(folders: dict[str, Path]) -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"model\.tile_mlp: Sequential has no child `mlp`, only 0"):
        tile_mlp(models.scorer(folders["llama"]), block, 4)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tiles_are_made_again_with_the_parameters_that_computed_them(folders: dict[str, Path], checkpointing: str) -> None:
    """Cast ones, in bfloat16: by the time of backward the block holds the stored ones again."""
    micro, found = collate(models.samples()), []
    for tokens in (0, 5):
        scorer = models.scorer(folders["llama"], compute_dtype=torch.bfloat16, tile_mlp=tokens, checkpointing=checkpointing)
        logprobs, *_ = scorer(micro)
        logprobs.sum().backward()
        found.append({key: parameter.grad for key, parameter in scorer.named_parameters()})
    for key, gradient in found[0].items():
        assert float((found[1][key] - gradient).norm() / gradient.norm()) < 0.05, key


def test_a_head_that_is_more_than_a_linear_layer_is_refused(tmp_path: Path) -> None:
    """BERT has a transform before its head: log-probs from the body's last hidden state would be wrong, and nothing would say so."""
    BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20).save_pretrained(tmp_path)
    for head in ("lm", "value"):
        with pytest.raises(UserError, match=r"cls\.predictions\..* is neither of the model's body nor of its head"):
            build(ModelSpec(str(tmp_path), head=head))


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"transformers cannot read its config\.json"):
        build(ModelSpec(str(tmp_path)))


def test_buffers_move_and_parameters_stay(folders: dict[str, Path]) -> None:
    """Off-loaded parameters wait in host memory, and are copied from there for use; buffers are read where they lie."""
    scorer = models.scorer(folders["llama"])
    stored = {name: part._non_persistent_buffers_set.copy() for name, part in scorer.named_modules()}
    module.move_buffers(scorer, torch.device("meta"))
    assert {buffer.device.type for buffer in scorer.buffers()} == {"meta"}
    assert {parameter.device.type for parameter in scorer.parameters()} == {"cpu"}
    assert {name: part._non_persistent_buffers_set for name, part in scorer.named_modules()} == stored
