"""Procedural tasks: rows made in code, each a pure function of (task, options, seed, index).

A task's row has `prompt` (the text), `answer` (what rewards compare with) and `completion` (what SFT learns to write); other columns are
for templates. The built-in prompts use digits, lower-case letters, space and colon, which the package's character tokenizer knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from random import Random
from typing import Any

from pydantic import Field

from drumroll.config import Positive, Section, TaskSource, validate
from drumroll.data.rows import Row
from drumroll.errors import UserError
from drumroll.plugins import install

GYM = "reasoning_gym:"
GYM_ROWS = 1_000_000  # when the recipe does not say: some of its tasks prepare something for every row at the start
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Columns = dict[str, Any]


class Sort(Section):
    """`sort 493817:` -> `134789`."""

    digits: Positive = Field(6, description="length of the string of digits")

    def make(self, random: Random) -> Columns:
        """One row: prompt, completion and answer, and what the class adds."""
        text = "".join(random.choices("0123456789", k=self.digits))
        return _row(f"sort {text}:", "".join(sorted(text)))


class Larger(Section):
    """`larger 27 51:` -> `51`; columns `a` and `b` hold the two numbers, which always differ."""

    digits: int = Field(2, ge=1, le=18, description="both numbers have this many digits, the first one not 0 (one digit: 0 to 9)")

    def make(self, random: Random) -> Columns:
        """One row: prompt, completion and answer, and what the class adds."""
        least = 10 ** (self.digits - 1) if self.digits > 1 else 0
        a, b = random.sample(range(least, 10**self.digits), 2)
        return {**_row(f"larger {a} {b}:", str(max(a, b))), "a": str(a), "b": str(b)}


class Reverse(Section):
    """`reverse abcde:` -> `edcba`."""

    length: Positive = Field(5, description="letters of the word")

    def make(self, random: Random) -> Columns:
        """One row: prompt, completion and answer, and what the class adds."""
        text = "".join(random.choices(LETTERS, k=self.length))
        return _row(f"reverse {text}:", text[::-1])


BUILTIN: dict[str, type[Sort] | type[Larger] | type[Reverse]] = {"sort": Sort, "larger": Larger, "reverse": Reverse}


def _row(prompt: str, answer: str) -> Columns:
    return {"prompt": prompt, "answer": answer, "completion": answer}


@dataclass(slots=True, frozen=True)
class TaskRows:
    """Rows of one task. `length` None: endless."""

    task: str
    seed: int
    length: int | None
    make: Callable[[int], Columns]  # index -> columns

    def row(self, index: int) -> Row:
        return Row(f"{self.task}:{self.seed}:{index}", self.make(index))

    def shapes(self) -> Iterator[Row]:
        yield self.row(0)


def task_rows(source: TaskSource, where: str = "data.train") -> TaskRows:
    """The rows that a `task:` section means. Raises UserError for an unknown task or option; `where` is the section's key."""
    if source.task.startswith(GYM):
        return TaskRows(source.task, source.seed, source.rows or GYM_ROWS, _reasoning_gym(source, where))
    elif source.task in BUILTIN:
        options = validate(BUILTIN[source.task], source.options, f"{where}.options of task {source.task!r}")
        make = _seeded(options.make, source.task, source.seed)
    else:
        near = get_close_matches(source.task, BUILTIN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{where}.task: unknown task {source.task!r}: expected {', '.join(BUILTIN)} or {GYM}NAME{hint}")
    return TaskRows(source.task, source.seed, source.rows, make)


def _seeded(make: Callable[[Random], Columns], task: str, seed: int) -> Callable[[int], Columns]:
    # Random seeds itself with a SHA-512 of the string: neighbouring indices and seeds have nothing in common.
    return lambda index: make(Random(f"{task}:{seed}:{index}"))


def _reasoning_gym(source: TaskSource, where: str) -> Callable[[int], Columns]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"{where}.task: {source.task} needs the extra: {install('reasoning-gym')}") from error
    name = source.task.removeprefix(GYM)
    try:
        dataset = reasoning_gym.create_dataset(name, seed=source.seed, size=source.rows or GYM_ROWS, **source.options)
    except (ValueError, TypeError, AssertionError) as error:
        asked = f"rows {source.rows or GYM_ROWS} and options {source.options}"
        raise UserError(f"{where}: reasoning_gym refuses {name!r} with {asked}: {error}") from error

    @lru_cache(maxsize=1024)  # some of their tasks are slow to make
    def make(index: int) -> Mapping[str, Any]:
        entry = dataset[index]
        return {**_row(entry["question"], str(entry["answer"])), "metadata": entry["metadata"]}

    return lambda index: dict(make(index))
