"""The Engine contract: a thing that samples, and knows nothing about training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from pydantic import BaseModel
from transformers import PreTrainedConfig

from drumroll.backends.base import LoraSpec
from drumroll.types import FinishReason, Stream


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Every field is explicit: nothing is inherited from a model's generation config.

    The distribution sampled from: logits / temperature, then top-k, then top-p, then min-p, renormalised.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy; log-probs are then those of temperature 1
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    eos_ids: tuple[int, ...] = ()  # sampling any of these ends a response with finish reason "stop"; the token is kept
    stop: tuple[str, ...] = ()  # strings that end a response with finish reason "stop"; the tokens that complete one are kept


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """`n` samples of one prompt. Identity (seed, stream, group_id, sample index) decides the random numbers, nothing else does."""

    group_id: int
    token_ids: list[int]  # [P]; must not be empty
    n: int
    sampling: SamplingParams
    stream: Stream = "train"


@dataclass(slots=True)
class Completion:
    group_id: int
    index: int  # 0 .. n-1
    token_ids: list[int]  # [R]
    logprobs: list[float]  # [R] natural log under the distribution sampled from
    version: int
    finish_reason: FinishReason
    text: str  # decoded without special tokens


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Which model the engine samples from."""

    path: str  # HF model folder: architecture, tokenizer and the initial weights
    dtype: torch.dtype
    device: torch.device
    seed: int
    max_length: int  # longest prompt + response in tokens
    trust_remote_code: bool = False
    lora: LoraSpec | None = None  # the adapters that are trained; an engine may have them too (`Engine.adapters_apart`)


class Engine(Protocol):
    Config: ClassVar[type[BaseModel]]  # the engine's own options (`engine.<name>.*`)

    def __init__(self, options: BaseModel) -> None: ...

    @property
    def adapters_apart(self) -> bool:
        """Whether the engine computes with adapters of its own beside the weights; else they must be merged into what it is sent."""

    def start(self, spec: EngineSpec) -> None:
        """Load the model and check itself. Raises UserError for a model it cannot sample from rightly."""

    def generate(self, requests: Iterable[GenerateRequest]) -> Iterator[Completion]:
        """Completions as they finish, in any order; every request gives exactly `n`."""

    def load_weights(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int, partial: bool = False) -> None:
        """Replace the weights by (HF name, full tensor) buckets. A name that is missing or unknown raises RunError.

        `partial`: what does not come stays as it is.
        """

    def digests(self) -> dict[str, int]:
        """HF name -> additive digest of the tensors that the engine computes with now."""

    def memory(self) -> int:
        """Bytes of device memory held: weights and cache."""

    def sleep(self) -> None:
        """Release the cache (and what else can be rebuilt); `generate` needs `wake` first."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Demand:
    """What an engine will be asked for on a rank."""

    config: PreTrainedConfig
    parameters: int  # of the model, tied ones once
    dtype: torch.dtype
    rows: int  # wanted at a time, at most
    prompt: int  # tokens of the longest prompt
    length: int  # tokens of the longest prompt and response


@dataclass(slots=True, frozen=True)
class Holding:
    """Bytes that an engine is foreseen to hold on a rank."""

    weights: int
    cache: int  # at its largest; held until `sleep`
    working: int  # of one prefill or decode step, beyond these


@runtime_checkable
class Foreseen(Protocol):
    """An engine that shares memory with training and can say how much it will take; `drumroll plan` asks."""

    @classmethod
    def foresee(cls, options: BaseModel, demand: Demand) -> Holding:
        """Without starting anything."""
