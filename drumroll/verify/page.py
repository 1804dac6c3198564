"""`drumroll verify --html`: the matrix, and below it every cell with what was measured. One file; no script, no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from drumroll.observe.checks import CheckRow
from drumroll.observe.page import PAGE
from drumroll.verify import machine
from drumroll.verify.cell import Cell, bound, not_run, number, tally, worst_by_check
from drumroll.verify.matrix import Matrix, mark
from drumroll.verify.rows import NOT_APPLICABLE, WHERE


def write(path: Path, matrix: Matrix, title: str, seconds: float) -> None:
    """Write the page; a folder that is not there is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(matrix, title, seconds), encoding="utf-8", errors="backslashreplace")


def html(matrix: Matrix, title: str, seconds: float) -> str:
    """The page as text."""
    counted = tally(matrix.cells)
    tone = "bad" if counted.failed or counted.not_run else "good"
    facts = "; ".join(machine.facts().values())
    body = [
        _matrix(matrix),
        "<p>Each cell: the worst measured difference over its bound, which must not pass 1. n/a: the backend refuses, and says why.</p>",
        "<h2>Cells</h2>",
        *(_details(matrix, cell) for cell in matrix.cells),
    ]
    return PAGE.substitute(
        title=escape(f"verify: {title}"),
        status=f'<span class="badge {tone}">{escape(counted.words())}</span>',
        story=escape(f"Training backends against the executable specification, on the same data, in {seconds:.0f} s. {facts}."),
        body="\n".join(body),
    )


def _matrix(matrix: Matrix) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("variant", *matrix.backends, "seconds"))
    lines = [f"<tr>{head}</tr>"]
    for variant in matrix.variants:
        cells = [matrix.cell(variant, backend) for backend in matrix.backends]
        filled = "".join(f"<td>{_link(matrix, cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{escape(variant)}</th>{filled}<td>{matrix.seconds(variant):.0f}</td></tr>")
    return f"<table>{''.join(lines)}</table>"


def _link(matrix: Matrix, cell: Cell | None) -> str:
    if cell is None:
        return ""
    colour = "dim" if not cell.applies else "good" if cell.passed else "bad"
    return f'<a href="#{_anchor(matrix, cell)}" style="color: var(--{colour})">{escape(mark(cell))}</a>'


def _anchor(matrix: Matrix, cell: Cell) -> str:
    return f"cell-{matrix.variants.index(cell.variant)}-{matrix.backends.index(cell.backend)}"


def _details(matrix: Matrix, cell: Cell) -> str:
    name = f"{cell.backend}, {cell.variant}"
    ranks = f"{cell.ranks} rank{'s' if cell.ranks > 1 else ''}, {cell.seconds:.1f} s"
    failed = [row for row in cell.rows if not row.passed]
    measured = worst_by_check(row for row in cell.rows if row.check != NOT_APPLICABLE)
    shown = [*failed, *(row for row in measured if row.passed)]
    table = "".join(_line(row) for row in shown)
    head = "<tr><th>check</th><th>worst</th><th>bound</th><th></th><th>where</th></tr>"
    refusals = "".join(f"<p>n/a: {escape(why)}</p>" for why in cell.refusals)
    return (
        f'<details id="{_anchor(matrix, cell)}"{"" if cell.passed else " open"}><summary>{escape(name)}: {escape(mark(cell))} '
        f"({ranks}, {len(cell.rows)} rows)</summary>{refusals}{f'<table>{head}{table}</table>' if table else ''}</details>"
    )


def _line(row: CheckRow) -> str:
    verdict = "pass" if row.passed else "not run" if not_run(row) else '<b style="color: var(--bad)">FAIL</b>'
    where = ", ".join(str(row.options[key]) for key in ("model", "batch", WHERE) if row.options.get(key))
    told = "measured" if row.tolerance is None and row.passed else verdict
    return f"<tr><td>{escape(row.check)}</td><td>{number(row)}</td><td>{bound(row)}</td><td>{told}</td><td>{escape(where)}</td></tr>"
