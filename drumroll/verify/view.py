"""The table of `drumroll verify BACKEND`: a line a check, a column a model, in each cell the worst value over all batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.observe.checks import CheckRow
from drumroll.verify.cell import Cell, at_least, bound, failed, not_run, number, tally, worst_by_check
from drumroll.verify.fitting import print_fitting
from drumroll.verify.rows import NOT_APPLICABLE, NOT_RUN, WHERE

ON = "on"  # head of the column that names the model of the worst value


def show(console: Console, cells: Sequence[Cell], title: str, seconds: float) -> None:
    """Print the table, then where each failed check failed first, then the verdict."""
    print_fitting(console, _by_model(cells, title), lambda: _worst(cells, title))
    show_verdict(console, cells, seconds)


def _by_model(cells: Sequence[Cell], title: str) -> Table:
    """A column a model."""
    models = [name for name in dict.fromkeys(str(row.options["model"]) for cell in cells for row in cell.rows) if name]
    table = _empty(title, models)
    for cell in cells:
        _head(table, cell)
        for check, of_check in _by_check(cell).items():
            values = [_value([row for row in of_check if row.options["model"] == model]) for model in models]
            table.add_row(escape(check), *values, *_end(of_check))
    return table


def _worst(cells: Sequence[Cell], title: str) -> Table:
    """For a narrow terminal: the worst of all models, and which one it is."""
    table = _empty(title, ["worst", ON])
    for cell in cells:
        _head(table, cell)
        for check, of_check in _by_check(cell).items():
            (worst,) = worst_by_check(of_check)
            table.add_row(escape(check), _value([worst]), escape(str(worst.options["model"])), *_end(of_check))
    return table


def _empty(title: str, names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("check", overflow="fold")
    for name in names:
        table.add_column(escape(name), justify="right", overflow="fold", no_wrap=name != ON)
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _head(table: Table, cell: Cell) -> None:
    table.add_section()
    table.add_row(f"[bold]{escape(cell.variant)}[/] [dim]{cell.seconds:.0f} s[/]")
    if not cell.applies:
        table.add_row(f"[dim]{NOT_APPLICABLE}[/]")


def _by_check(cell: Cell) -> dict[str, list[CheckRow]]:
    found: dict[str, list[CheckRow]] = {}
    for row in cell.rows:
        if row.check != NOT_APPLICABLE:
            found.setdefault(row.check, []).append(row)
    return found


def _end(rows: Sequence[CheckRow]) -> tuple[str, str]:
    """Bound and verdict of one check."""
    if not_run(rows[0]):
        return "", "[yellow]not run[/]"
    verdict = "[bold red]FAIL[/]" if any(failed(row) for row in rows) else "[green]pass[/]"
    return bound(max(rows, key=lambda row: row.tolerance or 0.0)), verdict


def show_verdict(console: Console, cells: Sequence[Cell], seconds: float) -> None:
    """Where each failed check failed first, what was refused or not tried, and the count."""
    counted = tally(cells)
    batches = list(dict.fromkeys(str(row.options["batch"]) for row in (*counted.ran, *counted.not_run)))
    console.print(f"[dim]Each value is the worst over ranks and batches ({escape('; '.join(batches))}).[/]", highlight=False)
    for cell in cells:
        for why in cell.refusals:
            console.print(f"[dim]{NOT_APPLICABLE}: {escape(f'{cell.backend}, {cell.variant}, {why}')}[/]", highlight=False)
    for check in dict.fromkeys(row.check for row in counted.failed):
        row, *others = [row for row in counted.failed if row.check == check]
        where = f"{row.options['model']}, {row.options['batch']}, {row.options['variant']}: {row.options.get(WHERE, '')}"
        more = f" [dim](and {len(others)} more)[/]" if others else ""
        who = f"{row.backend}, " if len({cell.backend for cell in cells}) > 1 else ""
        console.print(f"[bold red]FAIL[/] {escape(check)} [dim]({row.value:.3g})[/]: {escape(who + where)}{more}", highlight=False)
    for why in dict.fromkeys(str(row.options.get(WHERE, "")) for row in counted.not_run):
        scenarios = dict.fromkeys(row.check.removesuffix(NOT_RUN) for row in counted.not_run if row.options.get(WHERE, "") == why)
        console.print(f"[yellow]not run[/] {escape(', '.join(scenarios))}: {escape(why)}", highlight=False)
    colour = "red" if counted.failed else "yellow" if counted.not_run else "green"
    names = ", ".join(dict.fromkeys(row.check for row in counted.failed))
    console.print(f"[bold {colour}]{counted.words()}[/] in {seconds:.0f} s{escape(f': {names}') if names else ''}", highlight=False)


def _value(rows: Sequence[CheckRow]) -> str:
    """The value furthest from what is wanted: the least where something must all be there, else the largest."""
    if not rows or not_run(rows[0]):
        return ""
    if any(math.isnan(row.value) for row in rows):
        return "[bold red]error[/]"
    worst = (min if at_least(rows[0]) else max)(rows, key=lambda row: row.value)
    return number(worst) if all(row.passed for row in rows) else f"[bold red]{number(worst)}[/]"
