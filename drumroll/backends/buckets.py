"""Consecutive things handled together, as many as a limit on their bytes allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def buckets(items: Iterable[Item], size: Callable[[Item], float], limit: float) -> Iterator[list[Item]]:
    """Runs of `items` of at most `limit` bytes together; one that is larger is alone."""
    bucket: list[Item] = []
    held = 0.0
    for item in items:
        if bucket and held + size(item) > limit:
            yield bucket
            bucket, held = [], 0.0
        bucket.append(item)
        held += size(item)
    if bucket:
        yield bucket
