"""`drumroll verify --markdown`: a run as a document, such as docs/verified.md; what people wrote at its end stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drumroll.observe.checks import CheckRow
from drumroll.verify import machine
from drumroll.verify.cell import Cell, bound, number, tally
from drumroll.verify.matrix import Matrix, mark
from drumroll.verify.rows import BYTES_BY_FORMULA, BYTES_PER_PARAMETER
from drumroll.verify.variants import AS_IS

BY_HAND = "## Not verified here"  # this heading and what follows it are kept as they are


def write(path: Path, matrix: Matrix, title: str, seconds: float) -> None:
    """Write the document; what an older one has from the heading `## Not verified here` on is kept."""
    kept = path.read_text(encoding="utf-8").partition(BY_HAND)[1:] if path.is_file() else ("", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_document(matrix, title, seconds)) + "\n" + "".join(kept), encoding="utf-8")


def _document(matrix: Matrix, title: str, seconds: float) -> Iterator[str]:
    words = tally(matrix.cells).words()
    yield "# Verified\n"
    yield "This page is written by `drumroll verify --all --markdown docs/verified.md`; do not edit it above the last heading.\n"
    yield f"**{words[0].upper()}{words[1:]}**: {title}, in {seconds:.0f} s.\n"
    yield from (f"- {name}: {text}" for name, text in machine.facts().items())
    yield "\n## Matrix\n"
    yield "*pass* and the worst measured difference over its bound, over all checks, models, batches and ranks: 1 would be the bound."
    yield "*n/a*: the backend refuses, and says why below. Empty: it has no such option. What a check proves: [verify](verify.md).\n"
    yield from _table(["variant", *matrix.backends, "seconds"], (_row(matrix, variant) for variant in matrix.variants))
    yield from _memory(matrix)
    yield "\n## Measured\n"
    yield "The check that came nearest to its bound, in each cell.\n"
    head = ["variant", "backend", "ranks", "check", "model", "measured", "bound"]
    yield from _table(head, (_measured(cell, cell.worst) for cell in matrix.cells if cell.worst is not None))
    if refused := [(cell, why) for cell in matrix.cells for why in cell.refusals]:
        yield "\n## Not applicable\n"
        yield from _table(["variant", "backend", "model: reason"], ([cell.variant, cell.backend, why] for cell, why in refused))
    yield ""


def _row(matrix: Matrix, variant: str) -> list[str]:
    cells = [mark(matrix.cell(variant, backend)) for backend in matrix.backends]
    return [variant, *cells, f"{matrix.seconds(variant):.0f}"]


def _measured(cell: Cell, row: CheckRow) -> list[str]:
    return [cell.variant, cell.backend, str(cell.ranks), row.check, str(row.options["model"]), number(row), bound(row)]


def _memory(matrix: Matrix) -> Iterator[str]:
    """Persistent bytes a parameter of each backend as it is, where it says what it should need."""
    lines = []
    for cell in matrix.cells:
        largest = {row.check: row.value for row in sorted(cell.rows, key=lambda row: row.value)}
        if BYTES_PER_PARAMETER in largest and cell.variant == AS_IS.name:
            lines.append([cell.backend, str(cell.ranks), f"{largest[BYTES_PER_PARAMETER]:.2f}", f"{largest[BYTES_BY_FORMULA]:.2f}"])
    if lines:
        yield "\n## Persistent memory\n"
        yield "Bytes a parameter on the rank that has most: parameters, gradients and AdamW's moments in float32, between the last"
        yield "backward and the step, measured from storages. The formula is that of ZeRO; what is above it fills the rows of a tensor"
        yield "up to a multiple of the ranks, which on models as small as these is seen.\n"
        yield from _table(["backend", "ranks", "measured", "formula"], lines)


def _table(head: list[str], lines: Iterator[list[str]] | list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for line in lines:
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |"
