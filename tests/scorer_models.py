"""Tiny models with random weights as HF folders, samples for them, and what transformers itself says about those, one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from drumroll.backends.base import ModelSpec
from drumroll.models.build import build, materialise
from drumroll.models.scorer import Scorer
from drumroll.models.stream import load
from drumroll.types import TrainSample

VOCAB = 48
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_LONG |= {"original_max_position_embeddings": 32}
_GPT2 = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen2-tied": Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3-tied": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "gpt2": _GPT2,
    "llama-llama3": LlamaConfig(**_SHAPE, rope_parameters={**_LLAMA3, "original_max_position_embeddings": 16}),
    "qwen3-yarn": Qwen3Config(**_SHAPE, head_dim=16, rope_parameters=_YARN),
    "phi3-long": Phi3Config(**_SHAPE, original_max_position_embeddings=32, rope_parameters=_LONG),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=16),
    "opt": OPTConfig(vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(**_SHAPE, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4),
}


def make(name: str, folder: Path) -> Path:
    """Write the model; weights five times the usual size, so that a wrong position or a leak shows."""
    torch.manual_seed(0)
    model = Auto.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    model.save_pretrained(folder)
    return folder


def scorer(folder: Path, **spec: Any) -> Scorer:
    """Built on the meta device, materialised and loaded; parameters cast where the compute dtype asks for it."""
    built = build(ModelSpec(str(folder), **spec))
    materialise(built, torch.device("cpu"))
    load(built, folder)
    built.cast_parameters = True
    return built


def reference(folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    model: PreTrainedModel = Auto.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    return model


def samples(lengths: tuple[int, ...] = (7, 12, 3, 9), seed: int = 0) -> list[TrainSample]:
    """Random tokens; about 6 in 10 are targets, the last one always."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        made.append(TrainSample(rng.integers(3, VOCAB, length), mask))
    return made


def alone(model: PreTrainedModel, batch: list[TrainSample], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of all targets, each sample through transformers by itself."""
    parts = []
    for sample in batch:
        ids = torch.from_numpy(sample.token_ids)[None]
        log_p = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
        parts.append(log_p[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[torch.from_numpy(sample.target_mask[1:])])
    return torch.cat(parts)
