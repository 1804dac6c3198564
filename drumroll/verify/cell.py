"""One backend in one variant: its rows, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumroll.observe.checks import CheckRow
from drumroll.verify.rows import BIT_EQUAL, NOT_APPLICABLE, NOT_RUN, WHERE


@dataclass(slots=True, frozen=True)
class Cell:
    """All rows of a backend in a variant, over models and batches."""

    variant: str
    backend: str
    ranks: int
    rows: Sequence[CheckRow]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check ran and passed."""
        return all(row.passed for row in self.rows)

    @property
    def refusals(self) -> list[str]:
        """Why the backend does not do this, a model each: where it does it on another model, that is enough."""
        return [f"{row.options['model']}: {row.options[WHERE]}" for row in self.rows if row.check == NOT_APPLICABLE]

    @property
    def applies(self) -> bool:
        """False where the backend has refused every model."""
        return any(row.check != NOT_APPLICABLE for row in self.rows)

    @property
    def worst(self) -> CheckRow | None:
        """The row that is nearest to its bound, or furthest beyond it; None where nothing has one."""
        bounded = [row for row in self.rows if row.tolerance is not None or failed(row)]
        return max(bounded, key=share, default=None)

    @property
    def differing_bits(self) -> float | None:
        """Tensors and norms that are not the specification's bit for bit, where that was looked at."""
        return max((row.value for row in self.rows if row.check == BIT_EQUAL), default=None)


@dataclass(slots=True, frozen=True)
class Tally:
    """What cells come to. A scenario that was not tried is neither a check that passed nor one that failed."""

    ran: Sequence[CheckRow]
    failed: Sequence[CheckRow]
    not_run: Sequence[CheckRow]  # a row a scenario

    def words(self) -> str:
        """The verdict in one line."""
        told = f"{len(self.failed)} of {len(self.ran)} checks failed" if self.failed else f"all {len(self.ran)} checks passed"
        count = len(self.not_run)
        return told if not count else f"{told}, {count} scenario{'s were' if count > 1 else ' was'} not run"


def tally(cells: Iterable[Cell]) -> Tally:
    """Counts the rows of all cells; what a backend refuses is in none of them."""
    rows = [row for cell in cells for row in cell.rows if row.check != NOT_APPLICABLE]
    left_out = [row for row in rows if not_run(row)]
    return Tally(ran=[row for row in rows if not not_run(row)], failed=[row for row in rows if failed(row)], not_run=left_out)


def not_run(row: CheckRow) -> bool:
    return row.check.endswith(NOT_RUN)


def failed(row: CheckRow) -> bool:
    return not row.passed and not not_run(row)


def at_least(row: CheckRow) -> bool:
    """Whether the bound is from below: something must all be there."""
    return row.tolerance == 1.0


def share(row: CheckRow) -> float:
    """Measured difference over its bound: at most 1 where the row passes; infinite where it could not be measured or had to be exact."""
    if row.tolerance is None or math.isnan(row.value):
        return 0.0 if row.passed else math.inf
    if at_least(row):
        return 0.0 if row.passed else (1.0 / row.value if row.value > 0 else math.inf)
    if row.tolerance == 0.0:
        return 0.0 if row.value == 0.0 else math.inf
    return max(0.0, row.value / row.tolerance)


def worst_by_check(rows: Iterable[CheckRow]) -> list[CheckRow]:
    """The worst row of each check, in the order in which checks come first."""
    found: dict[str, CheckRow] = {}
    for row in rows:
        known = found.get(row.check)
        if known is None or _badness(row) > _badness(known):
            found[row.check] = row
    return list(found.values())


def _badness(row: CheckRow) -> tuple[float, float]:
    return share(row), -row.value if at_least(row) else row.value


def number(row: CheckRow) -> str:
    """The measured value, short."""
    if math.isnan(row.value):
        return "error"
    return f"{row.value:.1e}" if 0 < abs(row.value) < 0.01 else f"{row.value:.2g}" if abs(row.value) < 100 else f"{row.value:.0f}"


def bound(row: CheckRow) -> str:
    """What the value has to keep."""
    if row.tolerance is None:
        return ""
    return "exact" if row.tolerance == 0 else "≥ 1" if at_least(row) else f"{row.tolerance:.0e}"
