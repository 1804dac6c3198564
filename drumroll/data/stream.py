"""Endless, resumable streams over rows: Prompts for RL, TrainSamples for SFT, and the fixed list of evaluation prompts.

The order is a pure function of (seed, epoch), so a small cursor is all there is to save. Every draw gets a serial id that is never used
again, also for a row that is left out: the ids of what follows do not depend on what was skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from drumroll.config import DataConfig
from drumroll.data.chat import prompt_ids, sft_sample
from drumroll.data.rows import Row, Rows
from drumroll.errors import UserError
from drumroll.types import Prompt, Stream, TrainSample

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Cursor:
    """Where a stream stands; all that a checkpoint needs of it."""

    epoch: int = 0
    position: int = 0  # rows of this epoch drawn so far
    draws: int = 0  # rows drawn in all: the id of the next draw
    left_out: int = 0  # draws that gave nothing: prompts over max_prompt_tokens, samples without a target
    truncated: int = 0  # SFT samples cut at max_length


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Row indices in the order of one epoch, int64 [length].

    Shuffled by sorting a hash of (seed, epoch, index): unlike a library's permutation it is the same in every version, for ever.
    The hash is splitmix64's finaliser (Steele, Lea & Flood 2014).
    """
    index = np.arange(length, dtype=np.uint64)
    if not shuffle:
        return index.astype(np.int64)
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch))
    return np.argsort(_mix(index + key), kind="stable").astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # wraps modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


class RowStream:
    """Rows for ever: epoch after epoch of a finite source, or an endless task in its own order."""

    def __init__(self, rows: Rows, seed: int, shuffle: bool) -> None:
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._order = self._order_of(0)
        self.cursor = Cursor()

    def draw(self) -> tuple[int, Row]:
        """The next row and the serial id of this draw."""
        at, length = self.cursor, self._rows.length
        if length is not None and at.position == length:
            at = replace(at, epoch=at.epoch + 1, position=0)
            self._order = self._order_of(at.epoch)
        row = self._rows.row(at.position if self._order is None else int(self._order[at.position]))
        self.cursor = replace(at, position=at.position + 1, draws=at.draws + 1)
        return at.draws, row

    def restore(self, cursor: Cursor) -> None:
        """Go on where a stream over the same rows stood. Raises UserError when the rows cannot be the same."""
        length = self._rows.length
        if length is not None and cursor.epoch * length + cursor.position != cursor.draws:
            stood = f"row {cursor.position} of epoch {cursor.epoch} after {cursor.draws} draws"
            raise UserError(f"the data has {length} rows; the saved stream stood at {stood}: that was other data")
        self._order = self._order_of(cursor.epoch)
        self.cursor = cursor

    def next_of(self, make: Callable[[int, Row], T | None]) -> T:
        """Draw until `make` gives something; a None is counted as left out. Raises UserError when no row of an epoch can be used."""
        # One usable row may be the first of an epoch and the last of the next: only twice the length is sure to hold a whole epoch.
        length = self._rows.length
        for _ in range(10_000 if length is None else 2 * length):
            made = make(*self.draw())
            if made is not None:
                return made
            self.cursor = replace(self.cursor, left_out=self.cursor.left_out + 1)
        raise UserError(
            f"none of {length or 10_000} rows in a row can be used: "
            "prompts over data.max_prompt_tokens, or nothing to learn within the longest length"
        )

    def _order_of(self, epoch: int) -> np.ndarray | None:
        length = self._rows.length
        return None if length is None else epoch_order(length, self._seed, epoch, self._shuffle)


class PromptStream:
    """Prompts of the training stream, tokenised as they are drawn; a prompt over `max_prompt_tokens` is left out and counted."""

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataConfig, seed: int) -> None:
        self._stream = RowStream(rows, seed, data.shuffle)
        self._tokenizer, self._data = tokenizer, data
        for row in rows.shapes():
            prompt_ids(tokenizer, row, data)  # a row that the template refuses is met now, not in the middle of a run

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        before = self._stream.cursor.left_out
        prompts = [self._stream.next_of(self._prompt) for _ in range(count)]
        if before == 0 < self._stream.cursor.left_out:
            limit = self._data.max_prompt_tokens
            log.warning("left out a prompt of more than %d tokens (data.max_prompt_tokens); counted from here on", limit)
        return prompts

    def state(self) -> Cursor:
        return self._stream.cursor

    def restore(self, cursor: Cursor) -> None:
        self._stream.restore(cursor)

    def _prompt(self, group_id: int, row: Row) -> Prompt | None:
        return _prompt(self._tokenizer, row, self._data, group_id)


class SampleStream:
    """TrainSamples for SFT, tokenised as they are drawn; one without a target within `max_length` is left out, counted and warned of."""

    def __init__(
        self, rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataConfig, eos: Sequence[int], max_length: int, seed: int
    ) -> None:
        self._stream = RowStream(rows, seed, data.shuffle)
        self._tokenizer, self._data, self._eos, self._max_length = tokenizer, data, tuple(eos), max_length
        for row in rows.shapes():
            sft_sample(tokenizer, row, data, self._eos, max_length)

    def draw(self, count: int) -> list[TrainSample]:
        """The next `count` samples."""
        before = self._stream.cursor
        samples = [self._stream.next_of(self._sample) for _ in range(count)]
        now = self._stream.cursor
        if now.left_out > before.left_out:
            new, limit = now.left_out - before.left_out, self._max_length
            log.warning("left out %d samples that have nothing to learn within %d tokens (%d so far)", new, limit, now.left_out)
        if before.truncated == 0 < now.truncated:
            log.warning("cut a sample at %d tokens; counted from here on", self._max_length)
        return samples

    def state(self) -> Cursor:
        return self._stream.cursor

    def restore(self, cursor: Cursor) -> None:
        self._stream.restore(cursor)

    def _sample(self, draw: int, row: Row) -> TrainSample | None:
        made = sft_sample(self._tokenizer, row, self._data, self._eos, self._max_length)
        if made.truncated:
            self._stream.cursor = replace(self._stream.cursor, truncated=self._stream.cursor.truncated + 1)
        made.sample.group_id = draw
        return made.sample if made.sample.n_targets else None


@dataclass(slots=True, frozen=True)
class EvalPrompts:
    prompts: list[Prompt]  # every row once, in file order; group_id is the row's index
    left_out: int  # rows over max_prompt_tokens


def eval_prompts(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: DataConfig, limit: int) -> EvalPrompts:
    """The first `limit` rows, each once. Raises UserError when none is left: an evaluation of nothing has no mean."""
    count = limit if rows.length is None else min(limit, rows.length)
    made = [_prompt(tokenizer, rows.row(index), data, index, stream="eval") for index in range(count)]
    prompts = [prompt for prompt in made if prompt is not None]
    if not prompts:
        raise UserError(f"data.eval: none of {count} rows can be used (data.max_prompt_tokens: {data.max_prompt_tokens})")
    return EvalPrompts(prompts, left_out=count - len(prompts))


def _prompt(tokenizer: PreTrainedTokenizerBase, row: Row, data: DataConfig, group_id: int, stream: Stream = "train") -> Prompt | None:
    text, ids = prompt_ids(tokenizer, row, data)
    if len(ids) > data.max_prompt_tokens:
        return None
    return Prompt(group_id, row.id, text, ids, row.columns, stream)
