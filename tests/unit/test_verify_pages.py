"""What a run of `drumroll verify` is shown as: the matrix, the page and the document, from cells made by hand."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from drumroll.observe.checks import CheckRow
from drumroll.verify import command, markdown, page, suite
from drumroll.verify.cell import Cell, share, tally, worst_by_check
from drumroll.verify.matrix import Matrix, mark, show_matrix
from drumroll.verify.rows import BIT_EQUAL, BYTES_BY_FORMULA, BYTES_PER_PARAMETER, NOT_APPLICABLE
from drumroll.verify.view import show


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


LOST = [row("train: not run", math.nan, None, False, "given up after 3 crashes"), row("skip: not run", math.nan, None, False, "given up")]
GIVEN_UP = Cell("tiled MLP", "theirs", 2, LOST, 0.2)


def test_what_was_not_run_is_neither_passed_nor_failed() -> None:
    both = Cell("Muon", "theirs", 2, [FAILED[0], *GOOD.rows, LOST[0]], 2.0)
    assert tally([both]).words() == "1 of 4 checks failed, 1 scenario was not run"
    assert tally([GOOD, GIVEN_UP]).words() == "all 3 checks passed, 2 scenarios were not run"
    assert tally([GOOD, BITS, REFUSED]).words() == "all 5 checks passed"
    assert (mark(GIVEN_UP), mark(both), GIVEN_UP.passed) == ("not run", "FAIL 50000", False)
    assert "1 of 4 checks failed, 1 scenario was not run" in page.html(Matrix([both]), "all", 4.1)


@pytest.mark.parametrize(("rows", "passed", "said", "last"), [
    ([*GOOD.rows], True, "pass 0.50", "all 3 checks passed in 0 s"),
    ([*GOOD.rows, *LOST], False, "not run", "all 3 checks passed, 2 scenarios were not run in 0 s"),
    ([*GOOD.rows, FAILED[0], LOST[0]], False, "FAIL 50000", "1 of 4 checks failed, 1 scenario was not run in 0 s: gradients"),
])  # fmt: skip
def test_a_pipe_gets_a_line_a_variant_as_it_is_done_and_the_truth_at_the_end(
    monkeypatch: pytest.MonkeyPatch, rows: list[CheckRow], passed: bool, said: str, last: str
) -> None:
    out = io.StringIO()
    told: list[str] = []

    def verify(backends: list[str], setup: object, say: Callable[[Cell], None]) -> list[Cell]:
        cell = Cell("as it is", "ours", 2, rows, 1.5)
        say(cell)
        told.append(out.getvalue())
        return [cell]

    monkeypatch.setattr(suite, "verify", verify)
    assert command.run("ours", console=Console(file=out, width=80)) is passed
    assert told[0].splitlines()[-1] == f"ours, as it is: {said} (2 s)"
    assert out.getvalue().splitlines()[-1] == last


@pytest.mark.parametrize("terminal", [True, False])
def test_numbers_are_whole_at_80_columns(terminal: bool) -> None:
    """Seven models and six backends: on a terminal the worst of all stands in, and short marks; a pipe gets all of it."""
    models = [f"a family called {i}" for i in range(7)]
    named = [replace(row(check, 1.2345e-7 * 2**i), options={**row("x", 0.0).options, "model": model})
             for check in ("gradients", "sleep: parameters after 3 steps") for i, model in enumerate(models)]  # fmt: skip
    cells = [Cell("reshard_after_forward=False", f"backend{i}", 2, [*named, row(BIT_EQUAL, 12345.0, None)], 1234.0) for i in range(6)]
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None, force_terminal=terminal)
    show(console, cells[:1], "ours", 1.0)
    show_matrix(console, Matrix(cells), "all")
    text = out.getvalue()
    assert "…" not in text
    wanted = ["7.9e-06", models[6], "1e-05", "0.79"] if terminal else ["1.2e-07", "7.9e-06", *models, "pass 0.79, 12345 differ in bits"]
    assert [word for word in wanted if word not in text] == []
    if terminal:
        assert max(map(len, text.splitlines())) <= 80


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
