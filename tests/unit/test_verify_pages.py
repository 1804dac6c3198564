"""What a run of `drumroll verify` is shown as: the matrix, the page and the document, from cells made by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

from drumroll.observe.checks import CheckRow
from drumroll.verify import markdown, page
from drumroll.verify.cell import Cell, share, worst_by_check
from drumroll.verify.matrix import Matrix, mark
from drumroll.verify.rows import BIT_EQUAL, BYTES_BY_FORMULA, BYTES_PER_PARAMETER, NOT_APPLICABLE


def row(check: str, value: float, tolerance: float | None = 1e-5, passed: bool = True, where: str = "", backend: str = "ours") -> CheckRow:
    options = {"model": "llama", "batch": "1 micro-batch", "variant": "as it is"} | ({"where": where} if where else {})
    return CheckRow(check=check, backend=backend, options=options, ranks=2, value=value, tolerance=tolerance, passed=passed)


GOOD = Cell("as it is", "ours", 2, [row("gradients", 2e-6), row("loss", 5e-6), row("memory: parameter", 2.0, 1.0)], 1.5)
BITS = Cell("one rank", "ours", 1, [row("gradients", 0.0), row(BIT_EQUAL, 0.0, None)], 0.5)
FAILED = [row("gradients", 0.5, 1e-5, False, "rank 1, <b>"), row("names saved", 2.0, 0.0, False, "x|y")]
BAD = Cell("as it is", "theirs", 2, FAILED, 2.0)
REFUSED = Cell("one rank", "theirs", 1, [row(NOT_APPLICABLE, 0.0, None, True, "needs two ranks")], 0.1)
MATRIX = Matrix([GOOD, BITS, BAD, REFUSED])


def test_a_share_is_the_difference_over_its_bound() -> None:
    assert math.isclose(share(row("a", 2e-6)), 0.2)
    assert share(row("exact", 0.0, 0.0)) == 0.0
    assert share(row("exact", 1.0, 0.0, False)) == math.inf
    assert share(row("error", math.nan, None, False)) == math.inf
    assert share(row("measured", 7.0, None)) == 0.0
    assert share(row("at least", 3.0, 1.0)) == 0.0
    assert share(row("at least", 0.5, 1.0, False)) == 2.0


def test_a_cell_says_its_worst() -> None:
    assert [mark(cell) for cell in (GOOD, BITS, BAD, REFUSED, None)] == ["pass 0.50", "pass 0.00, bit-equal", "FAIL", "n/a", ""]
    assert GOOD.worst is not None
    assert GOOD.worst.check == "loss"
    assert BAD.worst is not None
    assert BAD.worst.check == "names saved"
    assert mark(Cell("one rank", "x", 1, [row("gradients", 1e-5), row(BIT_EQUAL, 3.0, None)], 0.0)) == "pass 1.00, 3 differ in bits"
    assert (MATRIX.variants, MATRIX.backends, MATRIX.seconds("as it is")) == (["as it is", "one rank"], ["ours", "theirs"], 3.5)
    assert [r.value for r in worst_by_check([row("a", 1e-6), row("a", 3e-6), row("b", 2.0, 1.0), row("b", 1.5, 1.0)])] == [3e-6, 1.5]


def test_the_page_needs_nothing_and_leads_from_the_matrix_to_each_cell() -> None:
    text = page.html(MATRIX, "all", 4.1)
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(?!#)', text) == []
    links = re.findall(r'href="#([\w-]+)"', text)
    assert len(links) == 4
    assert all(f'id="{link}"' in text for link in links)
    assert "2 of 7 checks failed" in text
    assert "rank 1, &lt;b&gt;" in text
    assert "needs two ranks" in text


def test_the_document_keeps_what_people_wrote_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "verified.md"
    markdown.write(file, MATRIX, "all", 4.1)
    assert markdown.BY_HAND not in file.read_text()
    by_hand = f"{markdown.BY_HAND}\n\nOnly by hand.\n"
    file.write_text(f"old\n{by_hand}")
    markdown.write(file, MATRIX, "all", 4.1)
    text = file.read_text()
    assert text.endswith(by_hand)
    assert "old" not in text
    assert "| as it is | pass 0.50 | FAIL | 4 |" in text
    assert "| one rank | pass 0.00, bit-equal | n/a | 1 |" in text
    assert "llama: needs two ranks" in text
    assert all(line.count("|") - line.count("\\|") in (0, 5, 4, 8) for line in text.splitlines())


def test_the_document_has_the_bytes_of_a_parameter(tmp_path: Path) -> None:
    measured = [row(BYTES_PER_PARAMETER, 12.04, None), row(BYTES_BY_FORMULA, 12.0, None)]
    markdown.write(tmp_path / "v.md", Matrix([Cell("as it is", "ours", 2, measured, 1.0)]), "ours", 1.0)
    assert "| ours | 2 | 12.04 | 12.00 |" in (tmp_path / "v.md").read_text()
