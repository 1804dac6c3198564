"""One call of a reward function and what became of it; the same in this process and in a worker."""

from __future__ import annotations

import asyncio
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

from drumroll.rewards.failure import in_a_line, trace
from drumroll.rewards.lookup import RewardFunction


@dataclass(slots=True, frozen=True)
class Outcome:
    """What became of one call."""

    kind: Literal["value", "timeout", "failed"]
    values: tuple[float | None, ...] = ()  # one a rollout
    detail: str = ""  # in one line: what a failure raised and where, or what was over which limit
    trace: str = ""  # of a failure that raised


def raised(error: BaseException) -> Outcome:
    """A failure, with what is to be said of it."""
    return Outcome("failed", detail=in_a_line(error), trace=trace(error))


@dataclass(slots=True, frozen=True)
class Call:
    function: int  # index into the pool's functions
    args: tuple[Any, ...]  # (rollout, prompt) or (group,)
    count: int  # rollouts judged by it: as many values must come back
    limit_s: float


def judged(function: RewardFunction, args: tuple[Any, ...], count: int) -> Outcome:
    """Call a reward function; whatever it raises or wrongly returns is a failure with a traceback, never a score."""
    try:
        value = function.call(*args)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return as_values(value, function, count)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a boundary: the function is the user's, and its failure must be counted
        return raised(error)


def as_values(value: Any, function: RewardFunction, count: int) -> Outcome:
    """What a function returned as an Outcome. Raises ValueError or TypeError for what is no reward."""
    values = list(value) if function.takes == "group" else [value]
    if len(values) != count:
        raise ValueError(f"expected {count} rewards, one a completion, got {len(values)}")
    return Outcome("value", tuple(None if v is None else _finite(v) for v in values))


async def _awaited(value: Any) -> Any:
    return await value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number or None, got {value!r}")
    return number
