"""Files, folders, and the rows in them that cannot be used: named by file and line before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from drumroll import config
from drumroll.config import DataConfig, FileSource, HubSource, TaskSource
from drumroll.data.rows import Rows
from drumroll.data.sources import open_rows
from drumroll.errors import UserError

GOOD = {"prompt": "1+1=", "answer": "2"}


def write(path: Path, *lines: Any) -> Path:
    text = [line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    path.write_bytes(b"\n".join(text) + b"\n")
    return path


def opened(path: Path, purpose: Any = "rl", columns: tuple[str, ...] = (), source: dict[str, Any] | None = None, **data: Any) -> Rows:
    file = FileSource(path=str(path), **(source or {}))
    return open_rows(file, DataConfig(train=file, **data), purpose, columns)


def refusal(path: Path, *args: Any, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(path, *args, **data)
    return str(caught.value)


def prompts(rows: Rows) -> list[str]:
    assert rows.length is not None
    return [rows.row(i).columns["prompt"] for i in range(rows.length)]


def test_jsonl_lines_are_rows_and_ids_are_line_numbers(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x"}, "", {"prompt": "y"}, {"prompt": "z"})
    rows = opened(file)
    assert [rows.row(i).id for i in range(3)] == [f"{file}:1", f"{file}:3", f"{file}:4"]
    assert prompts(rows) == ["x", "y", "z"]
    assert prompts(opened(file, source={"skip": 1, "rows": 1})) == ["y"]


def test_every_bad_row_is_named_by_file_and_line_and_what_is_wrong(tmp_path: Path) -> None:
    file = write(
        tmp_path / "bad.jsonl",
        GOOD,
        "{not json}",
        [1, 2],
        {"answer": "2"},
        {"prompt": 7, "answer": "2"},
        b'{"prompt": "\xff", "answer": "2"}',
        GOOD,
        {"prompt": "", "answer": "2"},
        {"prompt": "x"},
    )
    message = refusal(file, "rl", ("answer",))
    assert message.splitlines() == [
        "data.train: rows that cannot be used:",
        f"  {file}:2: not JSON: Expecting property name enclosed in double quotes at column 2",
        f"  {file}:3: expected a JSON object, got list",
        f"  {file}:4: no column 'prompt'; it has 'answer'",
        f"  {file}:5: column 'prompt': expected text or a list of chat messages, got int 7",
        f"  {file}:6: not UTF-8: invalid start byte at byte 12",
        "  and 2 more",
    ]


def test_half_a_surrogate_pair_is_refused_and_a_whole_pair_is_not(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", r'{"prompt": "\ud83d\ude00"}')
    assert prompts(opened(good)) == ["\N{GRINNING FACE}"]
    for row in (r'{"prompt": "a\ud83d"}', r'{"prompt": "a", "other": {"deep": ["\ude00"]}}'):
        assert "half of a surrogate pair" in refusal(write(tmp_path / "bad.jsonl", row))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "expected text or a list of chat messages, got list []"),
        (["hi"], "message 0: expected {role, content}, got str 'hi'"),
        ([{"role": "user"}], "message 0: content: expected text, got NoneType None"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ends with an assistant message"),
    ],
)
def test_chat_prompts(tmp_path: Path, prompt: Any, message: str) -> None:
    assert f"a.jsonl:1: column 'prompt': {message}" in refusal(write(tmp_path / "a.jsonl", {"prompt": prompt}))


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]})
    assert opened(file).length == 1
    assert "and so has data.system" in refusal(file, system="c")


def test_sft_rows(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", {"prompt": "a", "out": "b"}, {"prompt": "a", "out": ""})
    assert "text.jsonl:1: column 'prompt': a text alone has nothing to learn from: set data.completion" in refusal(text, "sft")
    assert refusal(text, "sft", completion="out").splitlines()[1:] == [f"  {text}:2: column 'out': expected text, got str ''"]
    assert opened(text, "sft", completion="out", source={"rows": 1}).length == 1
    chat = write(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "a"}]})
    assert "no assistant message to learn from" in refusal(chat, "sft")


def test_template_columns_are_needed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"a": "1", "b": "2"}, {"a": "1"})
    assert refusal(file, template="{a} or {b}?").splitlines()[1:] == [f"  {file}:2: no column 'b'; it has 'a'"]
    assert opened(file, template="{a} {{}}").length == 2
    assert "and {{ or }} for a brace" in refusal(file, template="{a} {")
    assert "{0} is not the name of a column" in refusal(file, template="{a} {0}")


def test_a_bad_row_beyond_the_rows_that_are_used_is_no_fault(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, "{", GOOD)
    assert opened(file, source={"rows": 1}).length == 1
    assert opened(file, source={"skip": 2}).length == 1
    assert "a.jsonl:2: not JSON" in refusal(file)


def test_parquet_and_folders_give_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    content = [{"prompt": f"p{i}", "answer": str(i), "nested": [{"role": "user", "content": "é"}]} for i in range(7)]
    saved = datasets.Dataset.from_list(content)
    saved.to_parquet(tmp_path / "a.parquet")
    saved.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"one": saved, "two": saved.select(range(2))}).save_to_disk(tmp_path / "splits")
    lines = write(tmp_path / "a.jsonl", *content)
    for path, source in ((lines, {}), (tmp_path / "a.parquet", {}), (tmp_path / "folder", {}), (tmp_path / "splits", {"split": "one"})):
        rows = opened(path, source=source)
        assert [dict(rows.row(i).columns) for i in range(7)] == content
        assert rows.row(6).id == f"{path}:7"
        assert opened(path, source={**source, "skip": 5, "rows": 9}).length == 2
    assert opened(tmp_path / "splits", source={"split": "two"}).length == 2
    assert "has the splits one, two; got None" in refusal(tmp_path / "splits")
    assert "only a folder saved by `datasets` has splits" in refusal(lines, source={"split": "one"})


@pytest.mark.parametrize(
    ("train", "fault"),
    [
        ({"taks": "sort"}, "unknown key 'data.train.taks'; did you mean 'data.train.task'?"),
        ({"task": "sort", "option": {}}, "unknown key 'data.train.option'; did you mean 'data.train.options'?"),
        ({"hub": "x", "spllit": "y"}, "unknown key 'data.train.spllit'; did you mean 'data.train.split'?"),
        ({"pathh": "x"}, "unknown key 'data.train.pathh'; did you mean 'data.train.path'?"),
        ({"foo": 1}, "data.train: expected a section with one of the keys task (made in code), path (file or folder) or hub"),
        ("sort", "data.train: expected a section with one of the keys task (made in code), path (file or folder) or hub"),
        ({"task": "sort", "rows": 0}, "data.train.rows: Input should be greater than 0"),
    ],
)
def test_a_mistyped_source_is_one_fault_not_one_for_each_kind(train: Any, fault: str) -> None:
    recipe = {"pipeline": "sft", "max_steps": 1, "run_dir": "x", "model": {"path": "m"}, "backend": {"name": "single"}}
    with pytest.raises(UserError) as caught:
        config.parse({**recipe, "data": {"train": train}})
    assert fault in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "none.jsonl")
    assert "expected a .jsonl or .parquet file" in refusal(write(tmp_path / "a.csv", "a,b"))
    assert "is not a parquet file" in refusal(write(tmp_path / "a.parquet", "nonsense"))
    assert "is not a folder saved by `datasets`" in refusal(tmp_path)
    assert "no rows in" in refusal(write(tmp_path / "a.jsonl", GOOD), source={"skip": 1})


def test_the_hub_out_of_reach_is_said() -> None:
    source = HubSource(hub="nobody/nothing")
    with pytest.raises(UserError, match=r"data.eval.hub: cannot load 'nobody/nothing' \(name None, split 'train'\)"):
        open_rows(source, DataConfig(train=source), "rl", where="data.eval")


def test_a_task_is_checked_against_what_rewards_and_template_need() -> None:
    source = TaskSource(task="larger")
    assert open_rows(source, DataConfig(train=source, template="{a} or {b}?"), "rl", ("answer",)).length is None
    with pytest.raises(UserError, match="larger:0:0: no column 'solution'; it has 'prompt', 'answer', 'completion', 'a', 'b'"):
        open_rows(source, DataConfig(train=source), "rl", ("solution",))


def test_gsm8k_rows_where_they_lie(repository: Path) -> None:
    file = repository / "../shared/data/gsm8k/train.jsonl"
    if not file.is_file():
        pytest.skip(f"GSM8K is not at {file}: it is read where it lies and never part of the project")
    rows = opened(file, "rl", ("answer",), prompt="question")
    assert rows.length == 7473
    assert rows.row(0).columns["answer"].endswith("#### 72")
