"""The models that a backend is verified on: five small ones made in code, or the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from drumroll.backends.base import Head, ModelSpec
from drumroll.models import value
from drumroll.models.build import build, parameter_names
from drumroll.models.experts import expert_modules
from drumroll.models.fused import file_tensors
from drumroll.models.locate import locate

# The vocabulary and the intermediate size divide by no usual number of ranks. Weights are wide enough for attention to matter, and dropout
# is on in the config, so that a backend that trains in train mode is seen.
_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 102,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "attention_dropout": 0.2,
    "attention_bias": True,
}
# 6 experts can be shared by 2 ranks or 3 and divide by 4 no more than the rest; 2 a token leave some without any in a small batch.
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
_FAMILIES: dict[str, Callable[[bool], PreTrainedConfig]] = {
    "qwen3 experts": lambda tied: Qwen3MoeConfig(**_SIZES, **_EXPERTS, tie_word_embeddings=tied),
    "llama": lambda tied: LlamaConfig(**_SIZES, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**_SIZES, tie_word_embeddings=tied),
}


Shapes = Mapping[tuple[str, ...], tuple[int, ...]]  # of every parameter, by its HF names: a tied one has several


@dataclass(slots=True, frozen=True)
class Subject:
    """One model, and what the suite has to know of it."""

    name: str
    path: str  # a HF model folder
    vocab: int
    tied: bool  # head and input embedding are one parameter
    embedding: str  # HF name of the input embedding
    experts: bool  # a mixture of experts
    shapes: Shapes

    def trained(self, patterns: Sequence[str], head: Head) -> list[tuple[int, ...]]:
        """Shapes of the parameters that train, as `ModelSpec.trainable` says it; a value head always does."""
        of_head = self.shapes if head == "lm" else _shapes(build(ModelSpec(self.path, head=head)).hf)
        wanted = [*patterns, re.escape(value.WEIGHT)]
        chosen = [shape for names, shape in of_head.items() if any(re.search(p, name) for p in wanted for name in names)]
        return chosen if patterns else list(of_head.values())


def builtin(folder: Path) -> list[Subject]:
    """Write a mixture of experts, and two families, untied and tied, below `folder`: always the same weights."""
    made = []
    for name in ("qwen3 experts", "llama", "llama tied", "qwen3", "qwen3 tied"):
        _write(folder / name.replace(" ", "-"), _FAMILIES[name.removesuffix(" tied")](name.endswith(" tied")))
        made.append(describe(name, folder / name.replace(" ", "-")))
    return made


def of_paths(paths: Sequence[str]) -> list[Subject]:
    """The user's models by folder, hub id or builtin:NAME. Raises UserError for one that is not there or is no causal language model."""
    names = [Path(path).name for path in paths]
    return [describe(name if names.count(name) == 1 else path, locate(path)) for name, path in zip(names, paths, strict=True)]


def describe(name: str, folder: Path) -> Subject:
    """What the config of a model folder says, without reading its weights."""
    scorer = build(ModelSpec(str(folder)))
    embedding = scorer.hf.get_input_embeddings().get_parameter("weight")
    names = parameter_names(scorer.hf)
    return Subject(
        name=name,
        path=str(folder),
        vocab=len(embedding),
        tied=scorer.tied,
        embedding=names[embedding][0],
        experts=bool(expert_modules(scorer.hf)),
        shapes=_shapes(scorer.hf),
    )


def _shapes(hf: nn.Module) -> Shapes:
    return {tuple(aliases): tuple(parameter.shape) for parameter, aliases in parameter_names(hf).items()}


def _write(folder: Path, config: PreTrainedConfig) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms all one and biases all zero would hide that they were not loaded
                    parameter.add_(0.1 * torch.randn_like(parameter))
    folder.mkdir(parents=True)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}  # each tied weight once
    apart = file_tensors(model, {name: tensor.shape for name, tensor in named.items()})
    tensors = {part.name: part.of(named[name]).clone() for name, parts in apart.items() for part in parts}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
