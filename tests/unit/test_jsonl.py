"""Record files survive a crash and any JSON parser reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.errors import RunError, UserError
from drumroll.observe import jsonl
from drumroll.observe.jsonl import JsonlWriter

LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


def strict(line: str) -> object:
    """Parse as a parser that knows only the JSON standard."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_non_finite_numbers_are_strings_that_float_reads() -> None:
    row = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "deep": [{"e": math.nan}, (1, 2)]}
    line = jsonl.dumps(row)
    assert strict(line) == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "deep": [{"e": "NaN"}, [1, 2]]}
    assert math.isnan(float(strict(line)["a"])) and float(strict(line)["c"]) == -math.inf  # type: ignore[index]


def test_numpy_values_are_plain_numbers() -> None:
    row = {"f": np.float32(0.5), "i": np.int64(3), "b": np.bool_(True), "v": np.array([1.0, np.nan]), "n": np.float32("inf")}
    assert strict(jsonl.dumps(row)) == {"f": 0.5, "i": 3, "b": True, "v": [1.0, "NaN"], "n": "Infinity"}


def test_a_lone_surrogate_is_escaped_and_comes_back() -> None:
    text = "half a pair \ud83d, done; Ω stays readable"
    line = jsonl.dumps({"text": text})
    assert b"\\ud83d" in line.encode("utf-8") and "Ω" in line
    assert strict(line) == {"text": text}


def test_no_character_breaks_a_line() -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028\u2029"
    line = jsonl.dumps({"text": text})
    assert len(line.splitlines()) == 1
    assert strict(line) == {"text": text}


@settings(max_examples=50, deadline=None)
@given(st.recursive(LEAF, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8))
def test_every_value_is_one_line_of_json(value: object) -> None:
    line = jsonl.dumps({"v": value})
    assert len(line.splitlines()) == 1
    strict(line)


def test_what_is_no_json_is_named() -> None:
    with pytest.raises(TypeError, match="cannot write a object as JSON"):
        jsonl.dumps({"x": object()})


def test_a_line_is_on_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "new" / "m.jsonl")
    writer.write({"step": 1})
    assert (tmp_path / "new" / "m.jsonl").read_bytes() == b'{"step": 1}\n'  # still open: a kill now loses nothing
    writer.close()


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_line_torn_anywhere_is_left_out_and_then_healed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    last = '{"step": 2, "text": "é"}'.encode()
    path.write_bytes(b'{"step": 1}\n' + last[:cut])
    assert [row["step"] for row in jsonl.read(path)] == [1]
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in jsonl.read(path)] == [1, 3]
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_a_whole_line_that_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert [row["step"] for row in jsonl.read(path)] == [1, 2]
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [row["step"] for row in jsonl.read(path)] == [1, 2, 3]


def test_a_torn_line_longer_than_a_block_is_healed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"text": "' + b"x" * 200_000)
    JsonlWriter(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_damage_in_the_middle_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"m\.jsonl:2: expected one JSON object a line"):
        list(jsonl.read(path))


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(jsonl.read(tmp_path / "none.jsonl")) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_ends_the_run_and_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"m\.jsonl: cannot append to it: .*No space left"), JsonlWriter(path) as writer:
        writer.write({"step": 1})  # and closing the file afterwards does not hide this
