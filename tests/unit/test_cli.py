"""Small outputs of the command line; what whole runs print is in the end-to-end tests."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import drumroll
from drumroll.cli import app
from drumroll.errors import UserError
from drumroll.observe.metrics import eval_record
from drumroll.pipelines.evaluate import table
from drumroll.runtime.memory import PROCESS_BYTES, check_processes
from tests.records import group


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"drumroll {drumroll.__version__}\n")


QUICKSTART = "recipes/quickstart.yaml"


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("import nothere\n", "A", ["cannot be imported: line 1: ModuleNotFoundError", "nothere"]),
        ("class A(:\n", "A", ["cannot be imported: SyntaxError", "line 1"]),
        ("class A: pass\n", "A", ["has no attribute 'Config'", "drumroll/backends/base.py"]),
        ("class A:\n    Config = 3\n", "A", ["its Config is 3, expected a subclass of pydantic's BaseModel"]),
        ("class Mine: pass\n", "Mime", ["defines no 'Mime'; did you mean 'Mine'?"]),
    ],
)
def test_a_plug_in_that_is_none_is_refused_in_words(tmp_path: Path, text: str, name: str, words: list[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    for _ in range(2):  # half of a module that failed is not taken for one
        done = CliRunner().invoke(app, ["train", QUICKSTART, f"backend.name={file}:{name}"])
        assert isinstance(done.exception, UserError)
        assert [word for word in [str(file), *words] if word not in str(done.exception)] == []


@pytest.mark.parametrize("command", [["plan", QUICKSTART], ["verify", "ddp"], ["eval", QUICKSTART]])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("")
    for target, words in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "is a file")):
        done = CliRunner().invoke(app, [*command, "--json", str(target)])
        assert isinstance(done.exception, UserError)
        assert words in str(done.exception)


def test_more_ranks_than_memory_has_room_for_are_refused() -> None:
    check_processes(2)
    words = rf"runtime.ranks=100000: a rank is a process of {PROCESS_BYTES >> 20} MiB .* lower it to \d+ or less"
    with pytest.raises(UserError, match=words):
        check_processes(100_000)


def test_an_evaluation_names_the_engine_and_fits_80_columns() -> None:
    result = eval_record(step=0, version=0, groups=[group([1.0]), group([None])], seconds=1.0)
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(table("my_engine", Path("/a/folder/" + "deep/" * 20), result, ranks=2))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert [word for word in ("my_engine", "no verdict", "eval_score") if word not in text] == []
    assert "none" not in text
