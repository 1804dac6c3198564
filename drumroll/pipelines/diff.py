"""Where two runs part: the first step at which a recorded number, a batch or a weight is not the same, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from drumroll.errors import UserError
from drumroll.observe.metrics import DigestRecord, StepRecord
from drumroll.observe.run import DIGESTS_FILE, METRICS_FILE, read_digests, read_steps

# In the order of a step's work: what differs first in it is nearest to the cause.
COMPARED = ("tokens_digest", "reward_mean", "logprob_mean", "entropy", "kl", "loss", "grad_norm", "lr", "skipped_steps")
SHOWN = 8  # tensors named

Step = tuple[str, int]  # phase and number


@dataclass(slots=True, frozen=True)
class Difference:
    """What is not the same at the first step where something is not."""

    step: str
    what: Sequence[str]  # names, with both values where they are short
    after: str = ""  # the last step compared where all was the same


@dataclass(slots=True, frozen=True)
class Compared:
    """Two runs, over the steps that both have."""

    steps: int  # whose metrics were compared
    metrics: Difference | None
    digested: Sequence[int]  # steps after which the weights were compared
    weights: Difference | None
    further: tuple[int, int] = (0, 0)  # steps that only the first, and only the second, has

    @property
    def equal(self) -> bool:
        return self.metrics is None and self.weights is None


def diff(first: Path, second: Path, console: Console | None = None) -> bool:
    """`drumroll diff RUN_A RUN_B`: print where they part; True when they are equal over the steps that both have.

    Raises UserError for a run without records or without digests, and for two that have no step in common.
    """
    console = console or Console()
    found = compare(first, second)
    console.print(f"{first} and {second}: {found.steps} steps in both, weights compared after {_steps(found.digested)}", highlight=False)
    for run, further in zip((first, second), found.further, strict=True):
        if further:
            console.print(f"{run} has {further} step{'s' if further > 1 else ''} more: not compared", highlight=False)
    for name, difference in (("numbers", found.metrics), ("weights", found.weights)):
        if difference is None:
            console.print(f"[green]{name}: equal[/]", highlight=False)
            continue
        since = f", equal up to {difference.after}" if difference.after else ""
        console.print(f"[bold red]{name}: they differ at {difference.step}{since}[/]", highlight=False)
        for line in difference.what:
            console.print(f"  {escape(line)}", highlight=False)
    return found.equal


def compare(first: Path, second: Path) -> Compared:
    """What `diff` prints."""
    metrics = _by_step(first), _by_step(second)
    both = [step for step in metrics[0] if step in metrics[1]]
    digests = _digests(first), _digests(second)
    digested = [step for step in digests[0] if step in digests[1]]
    if not both or not digested:
        what = "steps" if not both else "steps with digests"
        spans = [_span([number for _, number in of_run]) for of_run in metrics] if not both else [_span(list(of_run)) for of_run in digests]
        raise UserError(f"{first} and {second} have no {what} in common: {' and '.join(spans)}")
    return Compared(
        steps=len(both),
        metrics=_first((_named(step), _numbers(metrics[0][step], metrics[1][step])) for step in both),
        digested=digested,
        weights=_first((f"step {step}", _tensors(digests[0][step], digests[1][step])) for step in digested),
        further=(len(metrics[0]) - len(both), len(metrics[1]) - len(both)),
    )


def _first(found: Iterable[tuple[str, list[str]]]) -> Difference | None:
    after = ""
    for step, what in found:
        if what:
            return Difference(step, what, after)
        after = step
    return None


def _by_step(run: Path) -> dict[Step, StepRecord]:
    records: dict[Step, StepRecord] = {(record.phase, record.step): record for record in read_steps(run)}
    if not records:
        raise UserError(f"{run}: no records: expected the directory of a run, with {METRICS_FILE} in it")
    return records


def _digests(run: Path) -> dict[int, DigestRecord]:
    records = {record.step: record for record in read_digests(run)}
    if not records:
        raise UserError(f"{run}: no {DIGESTS_FILE}: its weights were not recorded; train it with record.digests=1 (or every so many steps)")
    return records


def _numbers(mine: StepRecord, theirs: StepRecord) -> list[str]:
    """Fields that differ in any bit; two NaNs are the same."""
    first, second = asdict(mine), asdict(theirs)
    pairs = [(name, first[name], second[name]) for name in COMPARED]
    return [f"{name}: {a} and {b}" for name, a, b in pairs if a != b and not (_is_nan(a) and _is_nan(b))]


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _tensors(mine: DigestRecord, theirs: DigestRecord) -> list[str]:
    names = list(dict.fromkeys((*mine.digests, *theirs.digests)))
    wrong = [name for name in names if mine.digests.get(name) != theirs.digests.get(name)]
    if not wrong:
        return []
    more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    alone = [name for name in wrong if name not in mine.digests or name not in theirs.digests]
    told = [f"{name}{' (only in one of them)' if name in alone else ''}" for name in wrong[:SHOWN]]
    return [f"{len(wrong)} of {len(names)} tensors:", *told, *more]


def _named(step: Step) -> str:
    return f"{step[0]} step {step[1]}"


def _steps(digested: Sequence[int]) -> str:
    return f"{len(digested)} of them ({_span(digested)})"


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
