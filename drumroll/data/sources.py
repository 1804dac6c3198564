"""Rows from files, folders and the hub, all of them judged before the first step.

Every row that the recipe uses is read and checked when the source is opened: a bad row is named by file and line then, not met at step 900.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from drumroll.config import DataConfig, FileSource, HubSource, SourceConfig, TaskSource
from drumroll.data.checks import row_faults, template_fields
from drumroll.data.rows import Row, Rows
from drumroll.data.tasks import GYM, task_rows
from drumroll.errors import UserError

JSON_LINES, PARQUET = (".jsonl", ".json", ".ndjson"), ".parquet"
HANDFUL = 5  # faults shown before "and N more"
Purpose = Literal["rl", "sft"]


@dataclass(slots=True, frozen=True)
class LoadedRows:
    rows: Sequence[Row]

    @property
    def length(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        return self.rows[index]

    def shapes(self) -> Iterator[Row]:
        seen: set[tuple[str, ...]] = set()
        for row in self.rows:
            lists = [value for value in row.columns.values() if isinstance(value, list)]
            shape = tuple(message["role"] for value in lists for message in value if isinstance(message, dict) and "role" in message)
            if shape not in seen:
                seen.add(shape)
                yield row


def open_rows(source: SourceConfig, data: DataConfig, purpose: Purpose, columns: Iterable[str] = (), where: str = "data.train") -> Rows:
    """Open a source and check every row that will be used.

    `columns`: what else must be in each row, e.g. what the rewards compare with. `where`: the section's key, for messages.
    Raises UserError that names file and line of the first few bad rows, or says what could not be opened.
    """
    needed = tuple(dict.fromkeys((*template_fields(data), *columns)))
    if isinstance(source, TaskSource):
        task = task_rows(source, where)
        _refuse(row_faults(task.row(0), data, purpose, needed), where)  # all rows of a task look alike
        return task
    rows: list[Row] = []
    _refuse(_collect(_read(source, where), data, purpose, needed, rows), where)
    if not rows:
        raise UserError(f"{where}: no rows in {_name(source)} (skip: {source.skip}, rows: {source.rows})")
    return LoadedRows(rows)


def check_source(source: SourceConfig, where: str) -> None:
    """What can be said of a source before its rows are read. Raises UserError: no such task or option, no such file, an unknown format."""
    if isinstance(source, TaskSource):
        if not source.task.startswith(GYM):  # whose tasks prepare their rows when they are opened
            task_rows(source, where)
    elif isinstance(source, FileSource):
        path = Path(source.path)
        if path.is_dir():
            return
        if not path.is_file():
            raise UserError(f"{where}.path: no such file or folder: {source.path} (from {Path.cwd()})")
        if source.split is not None:
            raise UserError(f"{where}.split: {source.path} is a file, only a folder saved by `datasets` has splits")
        if path.suffix not in (*JSON_LINES, PARQUET):
            raise UserError(f"{where}.path: {source.path}: expected a .jsonl or .parquet file, or a folder saved by `datasets`")


def _collect(found: Iterable[Row | str], data: DataConfig, purpose: Purpose, needed: Sequence[str], rows: list[Row]) -> Iterator[str]:
    """Keep good rows in `rows`, yield the faults of the others; a string is a row that could not even be read."""
    for item in found:
        if isinstance(item, str):
            yield item
            continue
        rows.append(item)
        yield from row_faults(item, data, purpose, needed)


def _refuse(faults: Iterator[str], where: str) -> None:
    shown = list(islice(faults, HANDFUL))
    if not shown:
        return
    more = sum(1 for _ in faults)
    lines = "\n".join(f"  {fault}" for fault in shown) + (f"\n  and {more} more" if more else "")
    raise UserError(f"{where}: rows that cannot be used:\n{lines}")


def _name(source: FileSource | HubSource) -> str:
    return source.path if isinstance(source, FileSource) else source.hub


def _read(source: FileSource | HubSource, where: str) -> Iterator[Row | str]:
    if isinstance(source, HubSource):
        found: Iterator[Row | str] = _from_hub(source, where)
    else:
        check_source(source, where)
        path = Path(source.path)
        if path.is_dir():
            found = _from_folder(source, where)
        else:
            found = _from_parquet(path, where) if path.suffix == PARQUET else _from_jsonl(path)
    return islice(found, source.skip, None if source.rows is None else source.skip + source.rows)


def _from_jsonl(path: Path) -> Iterator[Row | str]:
    """One JSON object a line; blank lines are no rows. Ids count lines of the file from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                yield f"{place}: not UTF-8: {error.reason} at byte {error.start}"
            except json.JSONDecodeError as error:
                yield f"{place}: not JSON: {error.msg} at column {error.colno}"
            else:
                yield Row(place, value) if isinstance(value, dict) else f"{place}: expected a JSON object, got {type(value).__name__}"


def _from_parquet(path: Path, where: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{where}.path: {path} is not a parquet file: {error}") from error
    return _numbered(str(path), (row for batch in table.to_batches() for row in batch.to_pylist()))


def _from_folder(source: FileSource, where: str) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_from_disk(source.path)
    except (FileNotFoundError, ValueError, OSError) as error:
        raise UserError(f"{where}.path: {source.path} is not a folder saved by `datasets`: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise UserError(f"{where}.split: {source.path} has the splits {', '.join(map(str, dataset))}; got {source.split!r}")
        dataset = dataset[source.split]
    elif source.split is not None:
        raise UserError(f"{where}.split: {source.path} has no splits; got {source.split!r}")
    return _numbered(source.path, dataset)


def _from_hub(source: HubSource, where: str) -> Iterator[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(source.hub, source.name, split=source.split)
    except Exception as error:  # a boundary: what the hub client raises (network, names, permissions) has no common type
        what = f"{source.hub!r} (name {source.name!r}, split {source.split!r})"
        raise UserError(f"{where}.hub: cannot load {what}: {type(error).__name__}: {error}") from error
    return _numbered(f"{source.hub}:{source.split}", dataset)


def _numbered(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    """Ids count rows from 1, as lines do."""
    return (Row(f"{name}:{number}", row) for number, row in enumerate(rows, start=1))
