"""Tables whose numbers are never cut: on a narrow terminal another table stands in, into a file or a pipe goes the whole one."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

ANY_WIDTH = 10_000


def print_fitting(console: Console, table: Table, narrow: Callable[[], Table]) -> None:
    """Print `table` as wide as it is, or `narrow()` on a terminal that has no room for it."""
    width = console.measure(table, options=console.options.update(max_width=ANY_WIDTH)).maximum
    if console.is_terminal:
        console.print(table if width <= console.width else narrow())
    else:
        Console(file=console.file, width=max(width, console.width), color_system=None).print(table)
