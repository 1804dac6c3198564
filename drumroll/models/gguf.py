"""A llama GGUF file as a HF model folder, weights dequantised to float32.

Read with the `gguf` package alone: what transformers makes of GGUF tokenizers differs from release to release, and the digits of numbers
must be tokens of their own here in every one of them. Llama files hold the rows of the query and key projections in the order of
interleaved rotary embeddings; HF models rotate halves, so these rows are put back.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from drumroll.errors import UserError
from drumroll.plugins import install

if TYPE_CHECKING:
    from gguf import GGUFReader

_CONTROL = 3  # token type of markers like <|im_end|>
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(file: Path, out: Path) -> None:
    """Write config, weights and tokenizer of a llama GGUF into the existing folder `out`.

    Raises UserError when `gguf` is not installed, or the file holds another architecture or kind of tokenizer.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"converting a GGUF file needs an extra: {install('smollm2')}")
    from gguf import GGUFReader

    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = (fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if found != ("llama", "gpt2", "smollm"):
        raise UserError(f"{file}: expected a llama model with the smollm tokenizer, got architecture, tokenizer, pre-tokenizer {found}")
    weights = _weights(reader, fields)
    config = _config(fields, tied="lm_head.weight" not in weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    GenerationConfig(**_special_ids(fields)).save_pretrained(out)
    tokenizer(fields).save_pretrained(out)
    origin = {"file": file.name, "weights": "dequantised from GGUF", "license": fields["general.license"]}
    (out / "ORIGIN.json").write_text(json.dumps(origin, indent=2) + "\n")


def tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits numbers into digits, as the SmolLM models were trained; adds no BOS."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    made.chat_template = fields["tokenizer.chat_template"]
    return made


def _weights(reader: GGUFReader, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        name, kind = _hf_name(tensor.name)
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)  # a copy: the file is mapped into memory
        weights[name] = torch.from_numpy(halves_from_interleaved(values, heads[kind]) if kind in heads else values)
    return weights


def halves_from_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * dim, in] of a query or key projection, from rotary pairs (2i, 2i + 1) to pairs (i, i + dim / 2)."""
    dim = rows.shape[0] // heads
    return np.ascontiguousarray(rows.reshape(heads, dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape))


def _hf_name(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> (`model.layers.3.self_attn.q_proj.weight`, `attn_q`)."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER:
            return f"model.layers.{layer}.{_LAYER[kind]}.weight", kind
        case [kind, "weight"] if kind in _TOP:
            return f"{_TOP[kind]}.weight", kind
    raise UserError(f"GGUF tensor {name!r} is not part of a llama model")


def _special_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: fields[f"tokenizer.ggml.{key}_token_id"] for name, key in keys.items()}


def _config(fields: Mapping[str, Any], tied: bool) -> LlamaConfig:
    special = _special_ids(fields)
    config = LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 12),  # 9.999999747e-06 is 1e-5 in float32
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        bos_token_id=special["bos_token_id"],
        eos_token_id=special["eos_token_id"],
        pad_token_id=special["pad_token_id"],
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config
