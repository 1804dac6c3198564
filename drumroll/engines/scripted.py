"""An engine that says what it is told to, for tests of what lies around an engine; it holds real weights, so digests are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM

from drumroll.config import Section
from drumroll.engines.base import Completion, EngineSpec, GenerateRequest
from drumroll.engines.response import Row, load_text, rows
from drumroll.engines.weights import load_in_place, parameter_digests, stored_bytes, vocabulary_of
from drumroll.errors import RunError


class Config(Section):
    responses: tuple[str, ...] = Field(("",), min_length=1, description="sample i of group g gets number (g + i) modulo their count")
    logprob: float = Field(-1.0, le=0, description="log-prob reported for every token")


class ScriptedEngine:
    Config: ClassVar[type[BaseModel]] = Config
    adapters_apart = False

    def __init__(self, options: BaseModel) -> None:
        assert isinstance(options, Config)
        self._options = options
        self._asleep = False
        self._version = 0

    def start(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)
        self._vocabulary = vocabulary_of(self._model)
        self._text = load_text(spec)
        self._scripts = [self._text.tokenizer.encode(text, add_special_tokens=False) for text in self._options.responses]

    def generate(self, requests: Iterable[GenerateRequest]) -> Iterator[Completion]:
        """The scripted responses, each ended by the first end-of-sequence id asked for, and cut as a sampler would cut them."""
        if self._asleep:
            raise RunError("generate: the engine sleeps; call wake first")
        for row in rows(requests, self._spec.seed, self._spec.max_length, self._vocabulary):
            script = self._scripts[(row.request.group_id + row.index) % len(self._scripts)]
            yield self._text.completion(row, self._version, "stop" if self._say(row, script) else "length")

    def _say(self, row: Row, script: list[int]) -> bool:
        """Append the script to the row; True when it stopped rather than ran out of tokens."""
        eos_ids = row.request.sampling.eos_ids
        for token in (*script, *eos_ids[:1]):
            row.token_ids.append(token)
            row.logprobs.append(self._options.logprob)
            if token in eos_ids or self._text.stopped(row):
                return True
            if len(row.token_ids) == row.limit:
                break
        return False

    def load_weights(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int, partial: bool = False) -> None:
        load_in_place(self._model, buckets, partial)
        self._version = version

    def digests(self) -> dict[str, int]:
        return parameter_digests(self._model)

    def memory(self) -> int:
        return stored_bytes([*self._model.parameters(), *self._model.buffers()])

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        del self._model


PLUGIN = ScriptedEngine
FOR_TESTS = True
