"""Small models made in code, for the quickstart, tests and benchmarks: a HF folder with random weights and a character tokenizer."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import astuple, dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from drumroll.errors import UserError

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_PAD, _BOS, _EOS = 0, 1, 2
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz :=,>-?\n.+*/()<;!'\"_[]|&#@"
_REVISION = 1  # of this file's way of making a folder; part of the cache key


@dataclass(slots=True, frozen=True)
class BuiltinSpec:
    family: str  # "llama" or "qwen3"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    positions: int = 2048
    seed: int = 0


SPECS = {
    "llama-0.8m": BuiltinSpec("llama", hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384),
    "llama-tied-0.8m": BuiltinSpec("llama", hidden=128, layers=4, heads=4, kv_heads=2, intermediate=384, tied=True),
    "llama-4.5m": BuiltinSpec("llama", hidden=256, layers=6, heads=8, kv_heads=4, intermediate=704),
    "llama-24m": BuiltinSpec("llama", hidden=512, layers=8, heads=8, kv_heads=4, intermediate=1408),
    "qwen3-0.9m": BuiltinSpec("qwen3", hidden=128, layers=4, heads=4, kv_heads=2, intermediate=448, tied=True),
    "qwen3-untied-0.9m": BuiltinSpec("qwen3", hidden=128, layers=4, heads=4, kv_heads=2, intermediate=448),
}


def folder(name: str, cache: Path) -> Path:
    """The HF folder of a model in `SPECS`, made once: the same bits each time, and never seen half-written.

    Raises UserError for an unknown name.
    """
    if name not in SPECS:
        near = get_close_matches(name, SPECS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"unknown model builtin:{name}: expected one of {', '.join(SPECS)}{hint}")
    spec = SPECS[name]
    key = hashlib.sha256(repr((_REVISION, astuple(spec), _SPECIAL, _CHARACTERS)).encode()).hexdigest()[:12]
    final = cache / "builtin" / f"{name}-{key}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        _write(spec, temporary)
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():  # otherwise another process was first, and made the same bits
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, BOS in front; characters outside the alphabet become <unk>. No chat template."""
    core = Tokenizer(models.WordLevel({token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS))}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", _BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _write(spec: BuiltinSpec, out: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        config = _config(spec)
        model = Qwen3ForCausalLM(config) if isinstance(config, Qwen3Config) else LlamaForCausalLM(config)
    names = [name for name, _ in model.named_parameters()]  # each tied weight once
    save_file({name: model.get_parameter(name).detach() for name in names}, out / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(out)
    GenerationConfig(pad_token_id=_PAD, bos_token_id=_BOS, eos_token_id=_EOS).save_pretrained(out)
    tokenizer().save_pretrained(out)


def _config(spec: BuiltinSpec) -> LlamaConfig | Qwen3Config:
    family: type[LlamaConfig | Qwen3Config] = {"llama": LlamaConfig, "qwen3": Qwen3Config}[spec.family]
    return family(
        vocab_size=len(_SPECIAL) + len(_CHARACTERS),
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=spec.positions,
        tie_word_embeddings=spec.tied,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        dtype="float32",
    )
