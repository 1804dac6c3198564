"""The table of `drumroll verify`: a line a check, a column a model, in each cell the worst value over all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.observe.checks import CheckRow
from drumroll.verify.rows import WHERE

_LABELS = ("model", "batch", WHERE)  # keys of a row's options that are not the backend's


def show(console: Console, rows: Sequence[CheckRow], title: str, seconds: float) -> None:
    """Print the table, then where each failed check failed first, then the verdict."""
    models = list(dict.fromkeys(str(row.options["model"]) for row in rows))
    lines: dict[tuple[str, str], list[CheckRow]] = {}
    for row in rows:
        lines.setdefault((_options(row), row.check), []).append(row)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("check", no_wrap=True, overflow="ellipsis")
    for model in models:
        table.add_column(escape(model), justify="right", min_width=7, overflow="fold")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    section = ""
    for (options, check), of_line in lines.items():
        if options != section:
            table.add_section()
            table.add_row(f"[bold]{escape(options)}[/]")
            section = options
        cells = [_cell([row for row in of_line if row.options["model"] == model]) for model in models]
        verdict = "[green]pass[/]" if all(row.passed for row in of_line) else "[bold red]FAIL[/]"
        table.add_row(escape(check), *cells, _bound(max(of_line, key=lambda row: row.tolerance or 0.0)), verdict)
    console.print(table)
    _verdict(console, rows, seconds)


def _verdict(console: Console, rows: Sequence[CheckRow], seconds: float) -> None:
    batches = list(dict.fromkeys(str(row.options["batch"]) for row in rows))
    console.print(f"[dim]Each value is the worst over ranks and batches ({escape('; '.join(batches))}).[/]", highlight=False)
    failed = [row for row in rows if not row.passed]
    for check in dict.fromkeys(row.check for row in failed):
        row, *others = [row for row in failed if row.check == check]
        options = f" {_options(row)}" if _options(row) else ""
        where = f"{row.options['model']}, {row.options['batch']}{options}: {row.options.get(WHERE, '')}"
        more = f" [dim](and {len(others)} more)[/]" if others else ""
        console.print(f"[bold red]FAIL[/] {escape(check)} [dim]({row.value:.3g})[/]: {escape(where)}{more}", highlight=False)
    if failed:
        names = ", ".join(dict.fromkeys(row.check for row in failed))
        console.print(f"[bold red]{len(failed)} of {len(rows)} checks failed[/] in {seconds:.0f} s: {escape(names)}", highlight=False)
    else:
        console.print(f"[bold green]all {len(rows)} checks passed[/] in {seconds:.0f} s", highlight=False)


def _options(row: CheckRow) -> str:
    return " ".join(f"{key}={value}" for key, value in row.options.items() if key not in _LABELS)


def _cell(rows: Sequence[CheckRow]) -> str:
    """The value furthest from what is wanted: the least where something must all be there, else the largest."""
    if not rows:
        return ""
    if any(math.isnan(row.value) for row in rows):
        return "[bold red]error[/]"
    worst = (min if rows[0].tolerance == 1.0 else max)(rows, key=lambda row: row.value)
    text = f"{worst.value:.1e}" if 0 < worst.value < 0.01 else f"{worst.value:.2g}"
    return text if all(row.passed for row in rows) else f"[bold red]{text}[/]"


def _bound(row: CheckRow) -> str:
    if row.tolerance is None:
        return ""
    return "exact" if row.tolerance == 0 else "≥ 1" if row.tolerance == 1.0 else f"{row.tolerance:.0e}"
