"""All cells of a run of `drumroll verify --all` as a matrix, variants by backends, on the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll.verify.cell import Cell, share


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
    worst = share(cell.worst) if cell.worst is not None else 0.0
    told = "" if math.isinf(worst) else f" {worst:.2f}" if worst < 10 else f" {worst:.0f}"
    bits = cell.differing_bits
    equal = "" if bits is None else f", {bits:.0f} differ in bits" if bits else ", bit-equal"
    return f"{'pass' if cell.passed else 'FAIL'}{told}{equal}"


def show_matrix(console: Console, matrix: Matrix, title: str) -> None:
    """Print the matrix."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    for backend in matrix.backends:
        table.add_column(escape(backend), overflow="fold")
    table.add_column("seconds", justify="right")
    for variant in matrix.variants:
        cells = [matrix.cell(variant, backend) for backend in matrix.backends]
        table.add_row(escape(variant), *(_coloured(cell) for cell in cells), f"{matrix.seconds(variant):.0f}")
    console.print(table)
    console.print("[dim]pass, and the worst measured difference over its bound; n/a: the backend refuses, and says why below.[/]")


def _coloured(cell: Cell | None) -> str:
    text = mark(cell)
    if cell is None or not cell.applies:
        return f"[dim]{text}[/]" if text else ""
    return f"[green]{text}[/]" if cell.passed else f"[bold red]{text}[/]"
