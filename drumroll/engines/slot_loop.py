"""Continuous batching over the slot cache: rows leave when they finish and waiting ones take their place.

Axis suffixes in shapes: B rows in flight (some of them idle), S slots, E end-of-sequence ids, K decode steps between two looks.

[Note: the loop] The last token of a prompt is not prefilled but is the first that a decode step takes: prefill then yields nothing but
keys and values, and a response's first token is sampled like every other. A group's prompt is prefilled once and its keys and values
go to the slots of all its rows. Rows start in the order of requests; a row whose group was prefilled in an earlier refill copies the
prompt from a slot of that group. Such a slot exists: only the newest group can be part started, it had rows in flight when it was cut
off, and what they leave behind stays until this very refill. Refills wait until 1/16 of the batch is idle, because a prefill of
one row costs as much Python as one of eight; when nothing waits, the same rule closes the gaps by moving rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from drumroll.engines.base import GenerateRequest
from drumroll.engines.cache import Decode, Prefill, SlotCache, decode_mask
from drumroll.engines.response import Row
from drumroll.engines.sampling import Distribution, sample, uniform
from drumroll.engines.weights import vocabulary_of
from drumroll.errors import RunError

_IDLE_SHARE = 16  # refill or compact when 1/16 of the batch is idle
_STEPS_BETWEEN_LOOKS = 8  # on an accelerator, where a look at finished rows waits for the device
_NO_TOKEN = -1


class Stopped(Protocol):
    def __call__(self, row: Row) -> bool: ...


@dataclass(slots=True)
class _Batch:
    """Device state of the rows in flight, rebuilt when rows come or go."""

    token: torch.Tensor  # int64 [B], the next input
    position: torch.Tensor  # int64 [B], where it goes
    last: torch.Tensor  # int64 [B], the last position a row may write: idle rows stay there
    key: torch.Tensor  # int64 [B]
    drawn: torch.Tensor  # int64 [B], tokens sampled so far
    index: torch.Tensor  # int64 [B], 0 .. B-1
    length: int  # tokens of the longest live row, the next input included
    distribution: Distribution


class SlotLoop:
    """Decodes rows with `model` over `cache`; one `run` at a time."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, slots: int, prefill_tokens: int) -> None:
        self._model = model
        self._device = model.device
        self._cache = cache
        self._slots = slots
        self._prefill_tokens = prefill_tokens
        self._vocabulary = vocabulary_of(model)
        self._steps = 1 if self._device.type == "cpu" else _STEPS_BETWEEN_LOOKS

    def run(self, waiting: Iterator[Row], stopped: Stopped) -> Iterator[tuple[Row, bool]]:
        """Rows as they finish, each with whether it stopped (an end-of-sequence id, a stop string) rather than ran out of tokens."""
        queue = _Queue(waiting)
        self._cache.release()  # an earlier run may have made it longer than this one needs, and a decode step may look at all of it
        slots: list[Row | None] = []
        idle = 0
        while queue or idle < len(slots):
            if idle * _IDLE_SHARE >= len(slots):
                rows = self._refill(slots, queue) if queue else self._compact(slots)
                slots, batch, eos_BE, idle = list(rows), self._batch(rows), _eos_table(rows), 0
            ids_KB, logprobs_KB = self._decode(batch)
            _check_finite(slots, logprobs_KB)
            gone = []
            for slot, row, stop in _take_in(slots, ids_KB, logprobs_KB, eos_BE, stopped):
                gone.append(slot)
                slots[slot] = None
                yield row, stop
            if gone:  # an idle row writes where it stands: the prompt before it may still be copied, and it must not outgrow the cache
                batch.last[gone] = batch.position[gone]
                batch.length = max((row.length for row in slots if row is not None), default=0)
                idle += len(gone)

    @torch.inference_mode()
    def _refill(self, slots: list[Row | None], queue: _Queue) -> list[Row]:
        """Put waiting rows into idle slots and new ones, prompts prefilled; returns the rows by slot, without gaps."""
        free = [slot for slot, row in enumerate(slots) if row is None] + list(range(len(slots), self._slots))
        new = list(zip(free, queue.take(len(free)), strict=False))
        slots = slots + [None] * (new[-1][0] + 1 - len(slots))
        self._cache.reserve(len(slots), max(len(row.request.token_ids) for _, row in new))
        groups: list[tuple[GenerateRequest, list[int]]] = []
        for slot, row in new:
            slots[slot] = row
            if not groups or groups[-1][0] is not row.request:
                groups.append((row.request, []))
            groups[-1][1].append(slot)
        if queue.newest is not None and queue.newest[0] is groups[0][0]:  # part started before: first, while its prompt is still there
            request, targets = groups.pop(0)
            self._cache.copy(self._index([queue.newest[1]] * len(targets)), self._index(targets), len(request.token_ids) - 1)
        self._prefill([group for group in groups if len(group[0].token_ids) > 1])
        queue.newest = new[-1][1].request, new[-1][0]
        return self._compact(slots)

    def _prefill(self, groups: list[tuple[GenerateRequest, list[int]]]) -> None:
        """Keys and values of each prompt but its last token into its group's slots, right-padded, at most `prefill_tokens` at a time."""
        groups = sorted(groups, key=lambda group: len(group[0].token_ids))
        while groups:
            count = 1  # sorted: the last of a chunk is its longest
            while count < len(groups) and (count + 1) * (len(groups[count][0].token_ids) - 1) <= self._prefill_tokens:
                count += 1
            chunk, groups = groups[:count], groups[count:]
            length = len(chunk[-1][0].token_ids) - 1
            prompts = [request.token_ids[:-1] + [0] * (length + 1 - len(request.token_ids)) for request, _ in chunk]
            targets = [slot for _, slots in chunk for slot in slots]
            source = [row for row, (_, slots) in enumerate(chunk) for _ in slots]
            self._cache.plan = Prefill(self._index(targets), self._index(source))
            self._model.get_decoder()(
                input_ids=self._index(prompts),
                position_ids=torch.arange(length, device=self._device).expand(count, length),
                past_key_values=self._cache,
                use_cache=True,
            )

    @torch.inference_mode()
    def _compact(self, slots: list[Row | None]) -> list[Row]:
        """Move rows from the end into idle slots; returns the rows by slot."""
        rows = [row for row in slots if row is not None]
        gaps = [slot for slot, row in enumerate(slots[: len(rows)]) if row is None]
        movers = [slot for slot in range(len(rows), len(slots)) if slots[slot] is not None]
        if movers:
            moved = [slots[slot] for slot in movers]
            self._cache.copy(self._index(movers), self._index(gaps), max(row.length for row in moved if row is not None))
            for slot, row in zip(gaps, moved, strict=True):
                slots[slot] = row
        return [row for row in slots[: len(rows)] if row is not None]

    def _batch(self, rows: list[Row]) -> _Batch:
        return _Batch(
            token=self._index([row.token_ids[-1] if row.token_ids else row.request.token_ids[-1] for row in rows]),
            position=self._index([row.length - 1 for row in rows]),
            last=self._index([len(row.request.token_ids) + row.limit - 1 for row in rows]),
            key=self._index([row.key for row in rows]),
            drawn=self._index([len(row.token_ids) for row in rows]),
            index=torch.arange(len(rows), device=self._device),
            length=max(row.length for row in rows),
            distribution=Distribution.of([row.request.sampling for row in rows], self._vocabulary, self._device),
        )

    @torch.inference_mode()
    def _decode(self, batch: _Batch) -> tuple[np.ndarray, np.ndarray]:
        """K decode steps: sampled ids and log-probs, [K, B] each, those of idle rows without meaning."""
        self._cache.reserve(len(batch.index), batch.length + self._steps)
        steps = [self._step(batch) for _ in range(self._steps)]
        return torch.stack([ids for ids, _ in steps]).cpu().numpy(), torch.stack([logprobs for _, logprobs in steps]).cpu().numpy()

    def _step(self, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token a row: ids and log-probs [B]."""
        length = self._cache.length if self._device.type == "cpu" else batch.length  # see [Note: slot cache]
        self._cache.plan = Decode(batch.index, batch.position, length)
        logits = self._model(
            input_ids=batch.token[:, None],
            position_ids=batch.position[:, None],
            attention_mask=decode_mask(batch.position, length, self._model.dtype),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        ids, logprobs = sample(logits, uniform(batch.key, batch.drawn), batch.distribution)
        batch.token = ids
        batch.position = torch.minimum(batch.position + 1, batch.last)
        batch.drawn = batch.drawn + 1
        batch.length += 1
        return ids, logprobs

    def _index(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _Queue:
    """Rows not yet started, read from their iterator when a slot is free for them."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self.newest: tuple[GenerateRequest, int] | None = None  # the request started last, and a slot that holds its prompt
        self._head: deque[Row] = deque(islice(rows, 1))

    def __bool__(self) -> bool:
        return bool(self._head)

    def take(self, count: int) -> list[Row]:
        taken = [*self._head, *islice(self._rows, count - len(self._head))][:count]
        self._head = deque(islice(self._rows, 1))
        return taken


def _eos_table(rows: list[Row]) -> np.ndarray:
    """End-of-sequence ids of each row, int64 [B, E]."""
    sets = [row.request.sampling.eos_ids for row in rows]
    width = max(map(len, sets))
    return np.array([ids + (_NO_TOKEN,) * (width - len(ids)) for ids in sets], dtype=np.int64).reshape(len(rows), width)


def _check_finite(slots: list[Row | None], logprobs_KB: np.ndarray) -> None:
    """Raises RunError when a live row was sampled from logits that are not finite."""
    broken_B = np.isnan(logprobs_KB).any(axis=0)
    if broken_B.any() and any(row is not None and broken_B[slot] for slot, row in enumerate(slots)):
        raise RunError("the model's logits are not finite, so nothing can be sampled: its weights hold NaN or infinity, or overflow")


def _take_in(
    slots: list[Row | None], ids_KB: np.ndarray, logprobs_KB: np.ndarray, eos_BE: np.ndarray, stopped: Stopped
) -> Iterator[tuple[int, Row, bool]]:
    """Append sampled tokens to their rows; (slot, row, stopped) of those that finish. The caller empties their slots."""
    ended_KB = (ids_KB[:, :, None] == eos_BE).any(-1)
    for ids_B, logprobs_B, ended_B in zip(ids_KB.tolist(), logprobs_KB.tolist(), ended_KB.tolist(), strict=True):
        for slot, row in enumerate(slots):
            if row is None:
                continue
            row.token_ids.append(ids_B[slot])
            row.logprobs.append(logprobs_B[slot])
            stop = ended_B[slot] or stopped(row)
            if stop or len(row.token_ids) == row.limit:
                yield slot, row, stop
