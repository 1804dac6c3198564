"""Rows of `drumroll verify` and of every benchmark: a measured value against what it has to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from drumroll.observe.jsonl import dumps


@dataclass(slots=True, frozen=True, kw_only=True)
class CheckRow:
    """The keys of a row in a `--json` file."""

    check: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    value: float
    tolerance: float | None = None  # the bound that `value` has to keep; None: only measured
    passed: bool


Options = Mapping[str, Any]


def at_most(check: str, value: float, tolerance: float, *, backend: str, options: Options | None = None, ranks: int = 1) -> CheckRow:
    """A row that passes when value <= tolerance; NaN fails."""
    return _row(check, value, tolerance, value <= tolerance, backend, options, ranks)


def at_least(check: str, value: float, tolerance: float, *, backend: str, options: Options | None = None, ranks: int = 1) -> CheckRow:
    """A row that passes when value >= tolerance; NaN fails."""
    return _row(check, value, tolerance, value >= tolerance, backend, options, ranks)


def measured(check: str, value: float, *, backend: str, options: Options | None = None, ranks: int = 1) -> CheckRow:
    """A row that only reports."""
    return _row(check, value, None, True, backend, options, ranks)


def _row(check: str, value: float, tolerance: float | None, passed: bool, backend: str, options: Options | None, ranks: int) -> CheckRow:
    # float and bool: NumPy's own kinds would not be equal after a round trip
    return CheckRow(
        check=check, backend=backend, options=dict(options or {}), ranks=ranks, value=float(value), tolerance=tolerance, passed=bool(passed)
    )


def table(rows: Sequence[CheckRow], title: str) -> Table:
    """A rich table of the rows, in their order."""
    grid = Table(title=title, title_justify="left", header_style="bold")
    for name in ("check", "backend", "options"):
        grid.add_column(name, overflow="fold")
    for name in ("ranks", "value", "tolerance"):
        grid.add_column(name, justify="right")
    grid.add_column("")
    for row in rows:
        options = " ".join(f"{key}={value}" for key, value in row.options.items())
        bound = "" if row.tolerance is None else f"{row.tolerance:.3g}"
        grid.add_row(row.check, row.backend, options, str(row.ranks), f"{row.value:.4g}", bound, verdict(row))
    return grid


def verdict(row: CheckRow) -> str:
    """The last cell of a row, as rich markup."""
    if not row.passed:
        return "[bold red]FAIL[/]"
    return "[dim]info[/]" if row.tolerance is None else "[green]pass[/]"


def write_rows(path: Path, rows: Sequence[CheckRow]) -> None:
    """A JSON array, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(f"  {dumps(asdict(row))}" for row in rows) + "\n]\n", encoding="utf-8")


def read_rows(path: Path) -> list[CheckRow]:
    return [CheckRow(**{**row, "value": float(row["value"])}) for row in json.loads(path.read_text(encoding="utf-8"))]
