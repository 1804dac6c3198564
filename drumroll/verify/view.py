"""The table of `drumroll verify BACKEND`: a line a check, a column a model, in each cell the worst value over all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.observe.checks import CheckRow
from drumroll.verify.cell import Cell, at_least, bound, number
from drumroll.verify.rows import NOT_APPLICABLE, WHERE


def show(console: Console, cells: Sequence[Cell], title: str, seconds: float) -> None:
    """Print the table, then where each failed check failed first, then the verdict."""
    rows = [row for cell in cells for row in cell.rows]
    models = [name for name in dict.fromkeys(str(row.options["model"]) for row in rows) if name]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("check", no_wrap=True, overflow="ellipsis")
    for model in models:
        table.add_column(escape(model), justify="right", min_width=7, overflow="fold")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for cell in cells:
        table.add_section()
        table.add_row(f"[bold]{escape(cell.variant)}[/] [dim]{cell.seconds:.0f} s[/]")
        for check in dict.fromkeys(row.check for row in cell.rows if row.check != NOT_APPLICABLE):
            of_line = [row for row in cell.rows if row.check == check]
            values = [_value([row for row in of_line if row.options["model"] == model]) for model in models]
            verdict = "[green]pass[/]" if all(row.passed for row in of_line) else "[bold red]FAIL[/]"
            table.add_row(escape(check), *values, bound(max(of_line, key=lambda row: row.tolerance or 0.0)), verdict)
        if not cell.applies:
            table.add_row(f"[dim]{NOT_APPLICABLE}[/]")
    console.print(table)
    show_verdict(console, cells, seconds)


def show_verdict(console: Console, cells: Sequence[Cell], seconds: float) -> None:
    """Where each failed check failed first, what was refused, and the count."""
    rows = [row for cell in cells for row in cell.rows if row.check != NOT_APPLICABLE]
    batches = list(dict.fromkeys(str(row.options["batch"]) for row in rows))
    console.print(f"[dim]Each value is the worst over ranks and batches ({escape('; '.join(batches))}).[/]", highlight=False)
    for cell in cells:
        for why in cell.refusals:
            console.print(f"[dim]{NOT_APPLICABLE}: {escape(f'{cell.backend}, {cell.variant}, {why}')}[/]", highlight=False)
    failed = [row for row in rows if not row.passed]
    for check in dict.fromkeys(row.check for row in failed):
        row, *others = [row for row in failed if row.check == check]
        where = f"{row.options['model']}, {row.options['batch']}, {row.options['variant']}: {row.options.get(WHERE, '')}"
        more = f" [dim](and {len(others)} more)[/]" if others else ""
        who = f"{row.backend}, " if len({cell.backend for cell in cells}) > 1 else ""
        console.print(f"[bold red]FAIL[/] {escape(check)} [dim]({row.value:.3g})[/]: {escape(who + where)}{more}", highlight=False)
    if failed:
        names = ", ".join(dict.fromkeys(row.check for row in failed))
        console.print(f"[bold red]{len(failed)} of {len(rows)} checks failed[/] in {seconds:.0f} s: {escape(names)}", highlight=False)
    else:
        console.print(f"[bold green]all {len(rows)} checks passed[/] in {seconds:.0f} s", highlight=False)


def _value(rows: Sequence[CheckRow]) -> str:
    """The value furthest from what is wanted: the least where something must all be there, else the largest."""
    if not rows:
        return ""
    if any(math.isnan(row.value) for row in rows):
        return "[bold red]error[/]"
    worst = (min if at_least(rows[0]) else max)(rows, key=lambda row: row.value)
    return number(worst) if all(row.passed for row in rows) else f"[bold red]{number(worst)}[/]"
