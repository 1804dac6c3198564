"""Where two runs part: the first step at which a recorded number, a batch or a weight is not the same, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.errors import UserError
from drumroll.observe.metrics import DigestRecord, StepRecord
from drumroll.observe.run import DIGESTS_FILE, METRICS_FILE, read_digests, read_steps

# In the order of a step's work: what differs first in it is nearest to the cause.
COMPARED = (
    *("tokens_digest", "reward_mean", "logprob_mean", "entropy", "kl", "value_mean", "advantage_abs_mean"),
    *("loss", "value_loss", "grad_norm", "lr", "skipped_steps"),
)
SHOWN = 8  # tensors named
DIGESTS_OFF = "train it with record.digests=1 (or every so many steps)"

Step = tuple[str, int]  # phase and number


@dataclass(slots=True, frozen=True)
class Difference:
    """What is not the same at the first step where something is not."""

    step: str
    what: Sequence[str]  # names
    after: str = ""  # the last step compared where all was the same


@dataclass(slots=True, frozen=True)
class Apart:
    """A recorded number that is not the same at every step."""

    name: str
    step: str  # the first one
    first: object
    second: object
    largest: float  # relative difference, over all steps; NaN: no numbers
    largest_at: str


@dataclass(slots=True, frozen=True)
class Compared:
    """Two runs, over the steps that both have."""

    steps: int  # whose metrics were compared
    metrics: Difference | None
    numbers: Sequence[Apart]  # in the order of a step's work
    digested: Sequence[int]  # steps after which the weights were compared; none: see `unweighed`
    weights: Difference | None
    unweighed: str = ""  # why no weights were compared
    further: tuple[int, int] = (0, 0)  # steps that only the first, and only the second, has

    @property
    def equal(self) -> bool:
        """Over all that was compared."""
        return self.metrics is None and self.weights is None


def diff(first: Path, second: Path, console: Console | None = None) -> bool:
    """`drumroll diff RUN_A RUN_B`: print where they part; True when all that was compared is equal, over the steps that both have.

    Raises UserError for a run without records, and for two that have no step in common.
    """
    console = console or Console()
    found = compare(first, second)
    weighed = f", weights compared after {_steps(found.digested)}" if found.digested else ""
    _say(console, f"{escape(f'{first} and {second}')}: {found.steps} steps in both{weighed}")
    for run, further in zip((first, second), found.further, strict=True):
        if further:
            _say(console, f"{escape(str(run))} has {further} step{'s' if further > 1 else ''} more: not compared")
    _say(console, _verdict("numbers", found.metrics))
    if found.numbers:
        console.print(_table(found.numbers))
    if found.unweighed:
        _say(console, f"[yellow]weights: not compared:[/] {escape(found.unweighed)}")
        return found.equal
    _say(console, _verdict("weights", found.weights))
    for line in found.weights.what if found.weights is not None else ():
        _say(console, f"  {escape(line)}")
    return found.equal


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _verdict(name: str, difference: Difference | None) -> str:
    if difference is None:
        return f"[green]{name}: equal[/]"
    since = f", equal up to {difference.after}" if difference.after else ""
    return f"[bold red]{name}: they differ at {difference.step}{since}[/]"


def _table(numbers: Sequence[Apart]) -> Table:
    """Whole at 80 columns."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("number", "first at", "one", "other", "relative", "largest", "at"):
        grid.add_column(name, justify="left" if name in ("number", "first at", "at") else "right", no_wrap=True)
    for apart in numbers:
        values = (_short(apart.first), _short(apart.second), _size(relative(apart.first, apart.second)), _size(apart.largest))
        grid.add_row(apart.name, apart.step, *values, apart.largest_at)
    return grid


def _short(value: object) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)[:10]


def _size(difference: float) -> str:
    return "" if math.isnan(difference) else f"{difference:.1e}"


def compare(first: Path, second: Path) -> Compared:
    """What `diff` prints."""
    metrics = _by_step(first), _by_step(second)
    both = [step for step in metrics[0] if step in metrics[1]]
    if not both:
        spans = [_span([number for _, number in of_run]) for of_run in metrics]
        raise UserError(f"{first} and {second} have no steps in common: {' and '.join(spans)}")
    digests = _digests(first), _digests(second)
    digested = [step for step in digests[0] if step in digests[1]]
    pairs = [(_named(step), metrics[0][step], metrics[1][step]) for step in both]
    return Compared(
        steps=len(both),
        metrics=_first((step, _numbers(mine, theirs)) for step, mine, theirs in pairs),
        numbers=[apart for name in COMPARED if (apart := _apart(name, pairs)) is not None],
        digested=digested,
        weights=_first((f"step {step}", _tensors(digests[0][step], digests[1][step])) for step in digested),
        unweighed="" if digested else _why_unweighed((first, second), digests),
        further=(len(metrics[0]) - len(both), len(metrics[1]) - len(both)),
    )


def relative(first: object, second: object) -> float:
    """|first - second| over the larger of both; NaN where one of them is no number."""
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return math.nan
    scale = max(abs(first), abs(second))
    return abs(first - second) / scale if scale else 0.0


def _apart(name: str, pairs: Sequence[tuple[str, StepRecord, StepRecord]]) -> Apart | None:
    values = [(step, asdict(mine)[name], asdict(theirs)[name]) for step, mine, theirs in pairs]
    apart = [(step, mine, theirs) for step, mine, theirs in values if not _same(mine, theirs)]
    if not apart:
        return None
    sizes = [(relative(mine, theirs), step) for step, mine, theirs in apart]
    largest, at = max((size for size in sizes if not math.isnan(size[0])), key=lambda size: size[0], default=(math.nan, ""))
    return Apart(name, *apart[0], largest, at)


def _why_unweighed(runs: Sequence[Path], digests: Sequence[Mapping[int, DigestRecord]]) -> str:
    bare = [str(run) for run, of_run in zip(runs, digests, strict=True) if not of_run]
    if bare:
        return f"digests are off in {' and '.join(bare)} (no {DIGESTS_FILE}); {DIGESTS_OFF}"
    return f"no steps with digests in common: {' and '.join(_span(list(of_run)) for of_run in digests)}"


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
    return {record.step: record for record in read_digests(run)}


def _numbers(mine: StepRecord, theirs: StepRecord) -> list[str]:
    """Names of the fields that differ."""
    first, second = asdict(mine), asdict(theirs)
    return [name for name in COMPARED if not _same(first[name], second[name])]


def _same(first: object, second: object) -> bool:
    """In every bit; two NaNs are the same."""
    return first == second or (_is_nan(first) and _is_nan(second))


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
