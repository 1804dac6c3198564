"""The rewards of a run: every function judges every rollout, and the weighted sum of their values is the reward.

A reward is a plain function `(rollout, prompt) -> float | None`, sync or async. None means "no verdict". A call over its time limit has
none either, nor has one that raises: none of these is ever a silent 0. A rollout without a verdict from a function whose weight is not 0
has no reward; it is left out of training, and counted. When no call of a function came to an end in one batch (each raised, or was over its
limit), the function is broken, and the run ends: with what it raised, where, and on which sample, or with its limit.

Where a function runs: an async function on an event loop of its own, all samples at once; a sync function in killable processes, unless it
is a built-in that cannot hang or `isolate: false` keeps it in this process (for state, or a debugger), where no limit can be held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from drumroll.config import RewardConfig
from drumroll.errors import RunError
from drumroll.rewards import lookup
from drumroll.rewards.call import Call, Outcome, as_values, judged, raised
from drumroll.rewards.failure import RewardFailure
from drumroll.rewards.lookup import RewardFunction
from drumroll.rewards.pool import WorkerPool
from drumroll.types import Group, Rollout

log = logging.getLogger(__name__)
RESPONSE = 80  # characters shown of a response
LOOP_GRACE_S = 30.0  # an event loop that does not come back this long after the last limit is blocked


@dataclass(slots=True, frozen=True)
class FunctionCounts:
    """Calls of one function in one batch, by rollout."""

    verdicts: int  # a number came back
    abstained: int  # None came back
    timed_out: int
    failed: int  # an exception, or something that is no number


@dataclass(slots=True, frozen=True)
class ScoreCounts:
    rollouts: int
    without_verdict: int  # rollouts whose reward is None
    functions: dict[str, FunctionCounts]  # by the name in the breakdown


@dataclass(slots=True, frozen=True)
class _Entry:
    name: str
    config: RewardConfig
    function: RewardFunction
    pooled: int | None  # index among the pool's functions


class RewardSet:
    """Scores groups in place. Use as a context manager, or `close` it: it may own processes and a thread."""

    def __init__(self, configs: Sequence[RewardConfig], workers: int | None = None) -> None:
        """Raises UserError for a function that cannot be found or called. `workers`: processes; none: one a core, 2 to 8."""
        self._entries: list[_Entry] = []
        pooled: list[RewardConfig] = []
        used: Counter[str] = Counter()
        for config in configs:
            lookup.check(config.fn, config.args)
            function = lookup.resolve(config.fn, config.args)
            builtin = lookup.BUILTIN.get(config.fn)
            isolated = not function.is_async and config.isolate and (builtin is None or builtin.isolate)
            used[config.fn] += 1
            name = config.fn if used[config.fn] == 1 else f"{config.fn}#{used[config.fn]}"
            self._entries.append(_Entry(name, config, function, len(pooled) if isolated else None))
            pooled += [config] if isolated else []
        size = workers if workers is not None else min(8, max(2, os.cpu_count() or 2))
        self._pool = WorkerPool([(config.fn, config.args) for config in pooled], size) if pooled else None
        self._loop = _LoopThread() if any(entry.function.is_async for entry in self._entries) else None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have for these rewards; to be checked when the data is opened."""
        return tuple(dict.fromkeys(column for e in self._entries for column in lookup.columns(e.config.fn, e.config.args)))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers there are now."""
        return self._pool.pids if self._pool is not None else []

    def score(self, groups: Sequence[Group]) -> ScoreCounts:
        """Fill in `reward` and `breakdown` of every rollout. Raises RewardFailure when a function fails or times out on all of them."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts:
            rollout.breakdown = {}
        counts = {entry.name: self._judge(entry, groups, rollouts) for entry in self._entries}
        for rollout in rollouts:
            rollout.reward = self._total(rollout)
        return ScoreCounts(len(rollouts), sum(rollout.reward is None for rollout in rollouts), counts)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _total(self, rollout: Rollout) -> float | None:
        terms = [(entry.config.weight, rollout.breakdown[entry.name]) for entry in self._entries if entry.config.weight != 0]
        values = [weight * value for weight, value in terms if value is not None]
        return sum(values) if len(values) == len(terms) else None

    def _judge(self, entry: _Entry, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> FunctionCounts:
        calls = _calls(entry, groups)
        outcomes = self._outcomes(entry, calls)
        values: list[float | None] = []
        kinds: Counter[str] = Counter()
        for call, outcome in zip(calls, outcomes, strict=True):
            values += outcome.values if outcome.kind == "value" else [None] * call.count
            kinds[outcome.kind] += call.count
        for rollout, value in zip(rollouts, values, strict=True):
            rollout.breakdown[entry.name] = value
        self._report(entry, calls, outcomes, kinds)
        verdicts = sum(value is not None for value in values)
        return FunctionCounts(verdicts, kinds["value"] - verdicts, kinds["timeout"], kinds["failed"])

    def _outcomes(self, entry: _Entry, calls: Sequence[Call]) -> list[Outcome]:
        if entry.pooled is not None and self._pool is not None:
            return self._pool.run(calls)
        if entry.function.is_async and self._loop is not None:
            return self._loop.run(entry, calls)
        return [judged(entry.function, call.args, call.count) for call in calls]

    def _report(self, entry: _Entry, calls: Sequence[Call], outcomes: Sequence[Outcome], kinds: Counter[str]) -> None:
        name, limit = entry.name, entry.config.timeout_s
        failures = [(call, outcome) for call, outcome in zip(calls, outcomes, strict=True) if outcome.kind == "failed"]
        first = f"the first: {failures[0][1].detail}; {_sample(failures[0][0])}" if failures else ""
        if outcomes and not kinds["value"]:
            raise RewardFailure(_broken(name, limit, kinds["failed"], kinds["timeout"], first), failures[0][1].trace if failures else "")
        if failures:
            text = "reward %s failed on %d responses, which have no verdict; %s\n%s"
            log.warning(text, name, kinds["failed"], first, failures[0][1].trace)
        if kinds["timeout"]:
            log.warning("reward %s: %d responses took over %g s and have no verdict", name, kinds["timeout"], limit)


def _broken(name: str, limit: float, failed: int, timed_out: int, first: str) -> str:
    """What to say of a function that came to an end for none of the responses; `first`: what its first failure was."""
    advice = f"over its limit of {limit:g} s: raise timeout_s of this reward, or see what it waits for"
    if not failed:
        return f"reward {name} gave no verdict on any response: all {timed_out} took it {advice}"
    rest = f" (the other {timed_out} took it {advice})" if timed_out else ""
    return f"reward {name} failed on {failed if timed_out else f'all {failed}'} responses{rest}; {first}"


def _sample(call: Call) -> str:
    """The row and the response that a call judged; of a group, the first of its responses."""
    judged = call.args[0]
    rollout, prompt = (judged.rollouts[0], judged.prompt) if isinstance(judged, Group) else call.args
    text = rollout.text if len(rollout.text) <= RESPONSE else rollout.text[:RESPONSE] + "..."
    return f"on response {rollout.index} to {prompt.prompt_id}, {text!r}; the row's columns: {', '.join(prompt.columns) or 'none'}"


def _calls(entry: _Entry, groups: Sequence[Group]) -> list[Call]:
    """One call a rollout, or one a group with the limits of its rollouts added up."""
    function, limit = entry.pooled or 0, entry.config.timeout_s
    if entry.function.takes == "group":
        return [Call(function, (group,), len(group.rollouts), limit * len(group.rollouts)) for group in groups]
    return [Call(function, (rollout, group.prompt), 1, limit) for group in groups for rollout in group.rollouts]


async def _judged_async(function: RewardFunction, call: Call) -> Outcome:
    try:
        async with asyncio.timeout(call.limit_s) as limit:
            return as_values(await function.call(*call.args), function, call.count)
    except TimeoutError as error:
        return Outcome("timeout") if limit.expired() else raised(error)
    except Exception as error:  # noqa: BLE001 - a boundary: the function is the user's, and its failure must be counted
        return raised(error)


class _LoopThread:
    """An event loop that lives as long as the reward set, so that clients which async functions keep stay usable."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="drumroll-rewards", daemon=True)
        self._thread.start()

    def run(self, entry: _Entry, calls: Sequence[Call]) -> list[Outcome]:
        """All calls at once, each under its own limit. Raises RunError when one of them does not give the loop back."""

        async def together() -> list[Outcome]:
            return list(await asyncio.gather(*(_judged_async(entry.function, call) for call in calls)))

        longest = max((call.limit_s for call in calls), default=0.0)
        future = asyncio.run_coroutine_threadsafe(together(), self._loop)
        try:
            return future.result(longest + LOOP_GRACE_S)
        except TimeoutError as error:
            raise RunError(
                f"reward {entry.name} has blocked its event loop for {LOOP_GRACE_S:g} s over its limit: "
                "an async function must await what takes time; make it a plain function to have it run in a process"
            ) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
