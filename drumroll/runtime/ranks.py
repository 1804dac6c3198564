"""The handle of the objects on all ranks, as the driver has it: typed calls, one result a rank.

    reports = ranks.call(Worker.push, version)                # the same arguments everywhere
    losses = ranks.scatter(Worker.train, [(a,), (b,)])        # one tuple of arguments a rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


W = TypeVar("W", bound=Closable)
R = TypeVar("R")
P = ParamSpec("P")


class Ranks(AbstractContextManager["Ranks[W]"], Generic[W]):
    """Handle of the objects on all ranks. Calls return one result a rank, in rank order."""

    world_size: int

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank with the same arguments."""
        if kwargs:
            raise TypeError("rank calls take positional arguments")
        return self.scatter(method, [args] * self.world_size)

    def scatter(self, method: Callable[..., R], args: Sequence[tuple[Any, ...]]) -> list[R]:
        """Run `method` on every rank, each with its own tuple of arguments."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
