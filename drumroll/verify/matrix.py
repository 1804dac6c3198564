"""All cells of a run of `drumroll verify --all` as a matrix, variants by backends, on the console."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.verify.cell import Cell, failed, share
from drumroll.verify.fitting import print_fitting


@dataclass(slots=True, frozen=True)
class Matrix:
    """Cells by variant and backend; a backend has no cell for an option that it does not have."""

    cells: Sequence[Cell]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(cell.variant for cell in self.cells))

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(cell.backend for cell in self.cells))

    def cell(self, variant: str, backend: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.variant, cell.backend) == (variant, backend)), None)

    def seconds(self, variant: str) -> float:
        return sum(cell.seconds for cell in self.cells if cell.variant == variant)


def mark(cell: Cell | None) -> str:
    """What a cell says: the worst difference over its bound, or that there is none."""
    if cell is None:
        return ""
    if not cell.applies:
        return "n/a"
    if not cell.passed and not any(failed(row) for row in cell.rows):
        return "not run"
    worst = share(cell.worst) if cell.worst is not None else 0.0
    told = "" if math.isinf(worst) else f" {worst:.2f}" if worst < 10 else f" {worst:.0f}"
    bits = cell.differing_bits
    equal = "" if bits is None else f", {bits:.0f} differ in bits" if bits else ", bit-equal"
    return f"{'pass' if cell.passed else 'FAIL'}{told}{equal}"


def short_mark(cell: Cell | None) -> str:
    """The same in at most seven characters: of a cell that passed, the number alone."""
    return mark(cell).partition(",")[0].removeprefix("pass ")


def show_matrix(console: Console, matrix: Matrix, title: str) -> None:
    """Print the matrix; where the terminal is too narrow, with short marks."""
    print_fitting(console, _table(matrix, title, mark), lambda: _table(matrix, title, short_mark))
    console.print("[dim]A number, after pass: the worst measured difference over its bound. n/a: refused, the reason is below.[/]")


def _table(matrix: Matrix, title: str, words: Callable[[Cell | None], str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("variant", overflow="fold")
    for backend in matrix.backends:
        table.add_column(escape(backend), no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for variant in matrix.variants:
        cells = [matrix.cell(variant, backend) for backend in matrix.backends]
        table.add_row(escape(variant), *(f"[{_colour(cell)}]{words(cell)}[/]" for cell in cells), f"{matrix.seconds(variant):.0f}")
    return table


def _colour(cell: Cell | None) -> str:
    if cell is None or not cell.applies:
        return "dim"
    return "green" if cell.passed else "bold red"
