"""A row of data, and what anything that has rows looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True, frozen=True)
class Row:
    id: str  # where it came from, e.g. "train.jsonl:17" (line) or "sort:0:17" (task, seed, index)
    columns: Mapping[str, Any]


class Rows(Protocol):
    @property
    def length(self) -> int | None:
        """Number of rows; None: endless."""

    def row(self, index: int) -> Row:
        """Row 0 <= index < length, always the same one."""

    def shapes(self) -> Iterator[Row]:
        """The first row of each sequence of roles: what a chat template accepts depends on the roles alone."""
