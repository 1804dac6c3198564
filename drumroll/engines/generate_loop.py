"""Sampling through transformers' own `generate`, for models that the slot cache cannot hold (sliding windows, hybrid layers).

Slower: a batch runs until its longest row ends. The tokens are still ours: a logits processor draws each of them by identity, with the
same sampler as the slot loop, and leaves it as the only choice of a greedy `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from drumroll.engines.response import Row
from drumroll.engines.sampling import Distribution, sample, uniform
from drumroll.engines.slot_loop import Stopped
from drumroll.engines.weights import vocabulary_of


class GenerateLoop:
    """Decodes up to `slots` rows at a time with `model.generate`."""

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model = model
        self._slots = slots
        # A model's own generation config fills every field that a call leaves open (penalties, suppressed tokens, end-of-sequence ids
        # that freeze a row): ours replaces it, and asks for nothing.
        model.generation_config = GenerationConfig(do_sample=False, num_beams=1, use_cache=True)
        self._vocabulary = vocabulary_of(model)

    def run(self, waiting: Iterator[Row], stopped: Stopped) -> Iterator[tuple[Row, bool]]:
        """Rows as their batch finishes, each with whether it stopped rather than ran out of tokens."""
        while rows := list(islice(waiting, self._slots)):
            yield from self._batch(rows, stopped)

    @torch.inference_mode()
    def _batch(self, rows: list[Row], stopped: Stopped) -> list[tuple[Row, bool]]:
        width = max(len(row.request.token_ids) for row in rows)
        prompts = [[0] * (width - len(row.request.token_ids)) + row.request.token_ids for row in rows]
        mask = [[0] * (width - len(row.request.token_ids)) + [1] * len(row.request.token_ids) for row in rows]
        draw = _DrawByIdentity(rows, stopped, self._vocabulary, self._model.device)
        model: Any = self._model  # what has `generate` is a mix-in that PreTrainedModel's type does not know
        model.generate(
            torch.tensor(prompts, device=self._model.device),
            attention_mask=torch.tensor(mask, device=self._model.device),
            max_new_tokens=max(row.limit for row in rows),
            logits_processor=[draw],
            stopping_criteria=[_AllDone(draw)],
        )
        return [(row, stop) for row, stop in zip(rows, draw.stopped, strict=True)]


class _DrawByIdentity(LogitsProcessor):
    """Draws the next token of every row, keeps it in the row, and masks all others."""

    def __init__(self, rows: list[Row], stopped: Stopped, vocabulary: int, device: torch.device) -> None:
        self._rows = rows
        self._text_stopped = stopped
        self._keys = torch.tensor([row.key for row in rows], device=device)
        self._distribution = Distribution.of([row.request.sampling for row in rows], vocabulary, device)
        self._drawn = 0
        self.stopped = [False] * len(rows)
        self.done = [False] * len(rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, logprobs = sample(scores, uniform(self._keys, torch.full_like(self._keys, self._drawn)), self._distribution)
        self._drawn += 1
        for slot, (row, token, logprob) in enumerate(zip(self._rows, ids.tolist(), logprobs.tolist(), strict=True)):
            if self.done[slot]:
                continue
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            self.stopped[slot] = token in row.request.sampling.eos_ids or self._text_stopped(row)
            self.done[slot] = self.stopped[slot] or len(row.token_ids) == row.limit
        return torch.full_like(scores, float("-inf")).scatter_(1, ids[:, None], 0.0)


class _AllDone(StoppingCriteria):
    def __init__(self, draw: _DrawByIdentity) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.tensor(self._draw.done, device=input_ids.device)
