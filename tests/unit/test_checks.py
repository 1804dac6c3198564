"""Rows of verify and the benchmarks."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
from rich.console import Console

from drumroll.observe.checks import CheckRow, at_least, at_most, measured, read_rows, table, write_rows


def rows() -> list[CheckRow]:
    return [
        at_most("gradients", np.float64(3e-8), 1e-5, backend="fsdp2", options={"reshard": True}, ranks=2),
        at_most("loss", math.nan, 1e-5, backend="fsdp2"),
        at_least("speed-up", 1.3, 1.2, backend="single"),
        at_least("speed-up", 1.1, 1.2, backend="single"),
        measured("tokens/s", 1234.5, backend="single"),
    ]


def test_what_passes() -> None:
    assert [row.passed for row in rows()] == [True, False, True, False, True]
    assert at_most("x", 1e-5, 1e-5, backend="b").passed and at_least("x", 1.2, 1.2, backend="b").passed


def test_the_file_is_plain_json_with_exactly_the_promised_keys(tmp_path: Path) -> None:
    write_rows(tmp_path / "new" / "rows.json", rows())
    found = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert all(list(row) == ["check", "backend", "options", "ranks", "value", "tolerance", "passed"] for row in found)
    assert (found[0]["value"], found[1]["value"], found[0]["options"]) == (3e-8, "NaN", {"reshard": True})
    back = read_rows(tmp_path / "new" / "rows.json")
    assert [row for row in back if row.check != "loss"] == [row for row in rows() if row.check != "loss"] and math.isnan(back[1].value)


def test_the_table_shows_values_and_verdicts() -> None:
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(table(rows(), "verify fsdp2"))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("verify fsdp2")
    assert [word for line in lines for word in ("pass", "FAIL", "info") if word in line] == ["pass", "FAIL", "pass", "FAIL", "info"]
    assert "reshard=True" in out.getvalue() and "3e-08" in out.getvalue()
