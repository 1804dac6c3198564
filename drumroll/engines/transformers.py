"""The embedded engine: samples from a Hugging Face decoder-only model inside the training process, with nothing further to install.

Models whose every layer is full attention run in the slot loop (continuous batching over a static cache), which proves itself at start
against a plain forward. Models with sliding windows or hybrid layers run through `model.generate`, and say so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from drumroll.backends.base import LoraSpec
from drumroll.config import Section
from drumroll.engines.base import Completion, Demand, EngineSpec, GenerateRequest, Holding
from drumroll.engines.cache import SLOT_ATTENTION, SlotCache, length_reached
from drumroll.engines.generate_loop import GenerateLoop
from drumroll.engines.response import load_text, positions, rows
from drumroll.engines.self_check import check_slot_path
from drumroll.engines.slot_loop import SlotLoop
from drumroll.engines.weights import load_in_place, parameter_digests, refuse_not_finite, stored_bytes, vocabulary_of
from drumroll.errors import RunError, UserError
from drumroll.models import lora
from drumroll.models.experts import choose_kernel
from drumroll.models.scorer import find_blocks

logger = logging.getLogger(__name__)


class Config(Section):
    slots: int = Field(256, gt=0, description="most rows in flight")
    cache_gib: float = Field(4.0, gt=0, description="most memory of the key-value cache; bounds the rows in flight")
    prefill_tokens: int = Field(4096, gt=0, description="most tokens of one prefill, padding included (a longer prompt goes alone)")
    adapters: Literal["merged", "apart"] = Field(
        "merged",
        description="LoRA: merged into the weights, so that sampling costs nothing more, but in bfloat16 small changes are rounded away; "
        "or beside them as in training, so that a push sends adapters alone",
    )
    loop: Literal["auto", "generate"] = Field("auto", description="auto: the slot loop where it is exact; generate: never")


class TransformersEngine:
    Config: ClassVar[type[BaseModel]] = Config

    def __init__(self, options: BaseModel) -> None:
        assert isinstance(options, Config)
        self._options = options
        self._asleep = False
        self._generating = False
        self._version = 0
        self.adapters_apart = False

    def start(self, spec: EngineSpec) -> None:
        """Load the model and compare the slot loop with a plain forward. Raises UserError for a model it cannot sample from rightly."""
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        reason = "loop=generate" if self._options.loop == "generate" else why_not_slots(config)
        self._seed = spec.seed
        self._max_length = min(spec.max_length, positions(config))
        self._model = _load(spec, SLOT_ATTENTION if reason is None else "sdpa")
        refuse_not_finite(self._model)
        self.adapters_apart = spec.lora is not None and self._options.adapters == "apart"
        if spec.lora is not None and self.adapters_apart:
            _adapt(self._model, spec.lora, spec.dtype)
        self._vocabulary = vocabulary_of(self._model)
        self._text = load_text(spec)
        self._cache: SlotCache | None = None
        self._loop: SlotLoop | GenerateLoop
        if reason is None:
            self._cache = SlotCache(config.get_text_config(decoder=True).num_hidden_layers)
            bytes_per_token = check_slot_path(self._model, self._cache, self._max_length)
            slots = self._slots_that_fit(bytes_per_token * self._max_length)
            self._loop = SlotLoop(self._model, self._cache, slots, self._options.prefill_tokens)
        else:
            logger.warning("%s: %s: sampling through model.generate, which is slower than the slot loop", spec.path, reason)
            self._loop = GenerateLoop(self._model, self._options.slots)

    def _slots_that_fit(self, bytes_per_row: int) -> int:
        return _slots_that_fit(self._options, bytes_per_row, self._max_length)

    @classmethod
    def foresee(cls, options: BaseModel, demand: Demand) -> Holding:
        """Weights; slots of the longest length; the logits of a decode step and what sampling makes of them, or a prefill's activations.

        Raises UserError where not even one row fits.
        """
        assert isinstance(options, Config)
        text = demand.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        size = text.to_dict().get("head_dim") or text.hidden_size // heads
        kv_heads = text.to_dict().get("num_key_value_heads") or heads
        token = 2 * text.num_hidden_layers * kv_heads * size * demand.dtype.itemsize
        slots = min(demand.rows, _slots_that_fit(options, token * demand.length, demand.length))
        decode = slots * text.vocab_size * (demand.dtype.itemsize + 3 * 4)  # logits; in float32, scaled, as weights
        wide = text.to_dict().get("intermediate_size") or 4 * text.hidden_size
        prefill = max(options.prefill_tokens, demand.prompt) * (3 * wide + 4 * text.hidden_size) * demand.dtype.itemsize
        return Holding(
            weights=demand.parameters * demand.dtype.itemsize,
            cache=slots * token * length_reached(demand.prompt, demand.length),
            working=max(decode, prefill),
        )

    def generate(self, requests: Iterable[GenerateRequest]) -> Iterator[Completion]:
        """Completions as they finish, in any order; every request gives exactly `n`."""
        if self._asleep:
            raise RunError("generate: the engine sleeps; call wake first")
        if self._generating:
            raise RunError("generate: another generate of this engine has not ended")
        self._generating = True
        try:
            waiting = rows(requests, self._seed, self._max_length, self._vocabulary)
            for row, stopped in self._loop.run(waiting, self._text.stopped):
                yield self._text.completion(row, self._version, "stop" if stopped else "length")
        finally:
            self._generating = False

    def load_weights(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int, partial: bool = False) -> None:
        """Replace the weights in place by (HF name, full tensor) buckets. Raises RunError for a name that is missing or unknown.

        `partial`: what does not come stays as it is.
        """
        if self._generating:
            raise RunError("load_weights: a generate is under way; its cache would mix two versions of the weights")
        load_in_place(self._model, buckets, partial)
        self._version = version

    def digests(self) -> dict[str, int]:
        """HF name -> digest of each parameter of the module that samples."""
        return parameter_digests(self._model)

    def memory(self) -> int:
        """Bytes held: weights, buffers and cache."""
        cached = self._cache.tensors() if self._cache is not None else []
        return stored_bytes([*self._model.parameters(), *self._model.buffers(), *cached])

    def sleep(self) -> None:
        """Release the cache."""
        if self._cache is not None:
            self._cache.release()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        """Release the cache and the model."""
        self.sleep()
        del self._model, self._loop


def _slots_that_fit(options: Config, bytes_per_row: int, length: int) -> int:
    fit = int(options.cache_gib * 2**30) // bytes_per_row
    if fit == 0:
        needed = bytes_per_row / 2**30
        raise UserError(f"engine.transformers.cache_gib={options.cache_gib}: one row of {length} tokens needs {needed:.2f} GiB")
    return min(options.slots, fit)


def why_not_slots(config: PreTrainedConfig) -> str | None:
    """Why the slot cache cannot hold this model, in words; None when every layer is full attention."""
    if config.is_encoder_decoder:
        return f"{config.model_type} is an encoder-decoder"
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    other = sorted({kind.__name__ for kind in kinds if kind is not DynamicLayer})
    return f"{config.model_type} has layers that are not full attention ({', '.join(other)})" if other else None


def _load(spec: EngineSpec, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        spec.path, dtype=spec.dtype, attn_implementation=attention, trust_remote_code=spec.trust_remote_code
    )
    choose_kernel(model, spec.dtype)
    torch.nn.Module.to(model, spec.device)
    model.eval().requires_grad_(False)
    return model


def _adapt(model: PreTrainedModel, spec: LoraSpec, dtype: torch.dtype) -> None:
    """Adapters that do nothing until some are pushed, in the dtype of the computation as they are cast to when training uses them."""
    lora.inject(model, replace(spec, base_dtype=dtype), find_blocks(model))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.zeros_like(parameter, dtype=dtype)
    model.requires_grad_(False)


PLUGIN = TransformersEngine
