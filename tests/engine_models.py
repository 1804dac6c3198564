"""Tiny models of several families with random weights, saved as HF folders, for the tests of engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from drumroll.engines.base import Completion, EngineSpec
from drumroll.models.builtin import tokenizer

VOCABULARY = 66  # the tokenizer's; no multiple of what an engine may pad it to
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ROPE: dict[str, Any] = _IDS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_ROPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_ROPE, head_dim=32, tie_word_embeddings=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_ROPE, head_dim=32, **_EXPERTS)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_ROPE, sliding_window=None)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=256, **_IDS)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_ROPE, sliding_window=8)),
}


def make(family: str, folder: Path, seed: int = 0, scale: float = 3.0) -> Path:
    """Write a model of `family` to `folder`; weights `scale` times the usual size, so that distributions are far from uniform."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def spec(folder: Path, **changes: Any) -> EngineSpec:
    given: dict[str, Any] = {"path": str(folder), "dtype": torch.float32, "device": torch.device("cpu"), "seed": 0, "max_length": 128}
    return EngineSpec(**(given | changes))


def by_identity(completions: list[Completion]) -> dict[tuple[int, int], Completion]:
    """Completions by (group id, sample index); fails when one came twice."""
    found = {(c.group_id, c.index): c for c in completions}
    assert len(found) == len(completions)
    return found
