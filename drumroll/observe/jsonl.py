"""JSON lines that survive a crash: whole lines are appended, and a torn last line is healed by the writer and tolerated by the reader.

Any JSON parser reads them: NaN and the infinities are written as the strings "NaN", "Infinity", "-Infinity" (`float()` gives them
back), lone surrogates are escaped, and no character that some readers take for a line break stands in a line unescaped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from drumroll.errors import RunError, UserError

T = TypeVar("T")

NON_FINITE = ("NaN", "Infinity", "-Infinity")
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}  # str.splitlines breaks here; JSON leaves them alone


def dumps(value: Any) -> str:
    """One line of JSON of dataclasses, mappings, sequences, numbers (NumPy's too), strings, booleans and None.

    Raises TypeError naming the type of anything else.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # a NaN somewhere: the slow way round
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    # "backslashreplace" writes a lone surrogate as \udXXX, which is its JSON escape
    return text.translate(_LINE_BREAKS).encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    """What `json` cannot write itself, as something it can."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r:.200}")


def _finite(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return _finite(_plain(value))


class JsonlWriter:
    """Appends objects, one a line. What is written is with the operating system at once; `sync` puts it on the disk.

    Opening a file whose last line was torn by a crash removes that line's rest first, so that the next one is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by close(); unbuffered: nothing is left to write after a failure
        _heal(self._file)

    def write(self, value: Any) -> None:
        self.write_all((value,))

    def write_all(self, values: Iterable[Any]) -> None:
        """Append several lines with one write. Raises RunError when the disk refuses, and closes the file."""
        block = memoryview("".join(dumps(value) + "\n" for value in values).encode("utf-8"))
        try:
            while block:
                block = block[self._file.write(block) :]
        except OSError as error:
            self._file.close()
            raise RunError(f"{self.path}: cannot append to it: {error}; free the disk, then resume the run") from error

    def sync(self) -> None:
        """Wait until everything is on the disk: a power cut after this loses nothing."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _heal(file: FileIO) -> None:
    """End the file with a whole line: cut a torn one off, end a complete one that lacks only its newline."""
    size = file.seek(0, os.SEEK_END)
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    last = tail.rpartition(b"\n")[2]
    if not last:
        return
    if _is_object(last):
        file.write(b"\n")
    else:
        file.truncate(size - len(last))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError
        return False


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file, one a line, read as they are asked for; a torn last line is left out, a missing file has none.

    Raises UserError naming file and line for a line that is no object anywhere else.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if _is_object(line):
                yield json.loads(line)
            elif line.endswith(b"\n") and line.strip():
                raise UserError(f"{path}:{number}: expected one JSON object a line, got {line[:80]!r}; remove that line to go on")


def decode(cls: type[T], row: Mapping[str, Any], where: str) -> T:
    """A flat record dataclass from its JSON object; numbers written as strings come back as floats, unknown keys are left out.

    Raises UserError naming `where` and the missing field.
    """
    known = {f.name: str(f.type) for f in fields(cls)}  # type: ignore[arg-type]  # always a dataclass
    values = {name: _number(row[name]) if "float" in kind else row[name] for name, kind in known.items() if name in row}
    try:
        return cls(**values)
    except TypeError as error:
        raise UserError(f"{where}: not a {cls.__name__}: {error}") from error


def _number(value: Any) -> Any:
    if isinstance(value, str) and value in NON_FINITE:
        return float(value)
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    return value
