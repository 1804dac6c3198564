"""Small outputs of the command line; what whole runs print is in the end-to-end tests."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

import drumroll
from drumroll.cli import app
from drumroll.observe.metrics import eval_record
from drumroll.pipelines.evaluate import table
from tests.records import group


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"drumroll {drumroll.__version__}\n")


def test_an_evaluation_names_the_engine_and_fits_80_columns() -> None:
    result = eval_record(step=0, version=0, groups=[group([1.0]), group([None])], seconds=1.0)
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(table("my_engine", Path("/a/folder/" + "deep/" * 20), result, ranks=2))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert [word for word in ("my_engine", "no verdict", "eval_score") if word not in text] == []
    assert "none" not in text
