"""Procedural tasks: pure functions of (task, options, seed, index), with right answers."""

from __future__ import annotations

import re

import pytest

from drumroll.config import TaskSource
from drumroll.data.tasks import BUILTIN, task_rows
from drumroll.errors import UserError
from drumroll.plugins import install

ALPHABET = set("0123456789abcdefghijklmnopqrstuvwxyz :=,>-?\n")  # what every character tokenizer of the package knows
RIGHT = {"sort": lambda s: "".join(sorted(s)), "larger": lambda s: str(max(map(int, s.split()))), "reverse": lambda s: s[::-1]}


def columns(task: str, index: int, seed: int = 0, **options: int) -> dict[str, str]:
    return dict(task_rows(TaskSource(task=task, seed=seed, options=options)).row(index).columns)


def test_pinned_rows() -> None:
    """Another Python, another machine, another year: the same rows. A change here changes every recorded run."""
    assert columns("sort", 3) == {"prompt": "sort 452195:", "answer": "124559", "completion": "124559"}
    assert columns("larger", 3) == {"prompt": "larger 97 37:", "answer": "97", "completion": "97", "a": "97", "b": "37"}
    assert columns("reverse", 3) == {"prompt": "reverse bktzv:", "answer": "vztkb", "completion": "vztkb"}


@pytest.mark.parametrize("task", BUILTIN)
def test_rows_are_pure_right_and_spelled_with_the_alphabet(task: str) -> None:
    rows, others = task_rows(TaskSource(task=task)), task_rows(TaskSource(task=task, seed=1))
    backwards = [rows.row(index) for index in reversed(range(300))][::-1]
    for index, row in enumerate(backwards):
        again = rows.row(index)
        assert again == row and row.id == f"{task}:0:{index}"
        assert set(row.columns["prompt"] + row.columns["answer"]) <= ALPHABET
        body = row.columns["prompt"].removeprefix(f"{task} ").removesuffix(":")
        assert row.columns["answer"] == row.columns["completion"] == RIGHT[task](body)
    assert len({row.columns["prompt"] for row in backwards}) > 280  # neighbours have nothing in common
    assert sum(others.row(index).columns == row.columns for index, row in enumerate(backwards)) < 5


def test_options() -> None:
    assert len(columns("sort", 0, digits=9)["answer"]) == 9
    assert len(columns("reverse", 0, length=2)["answer"]) == 2
    assert {len(columns("larger", i, digits=4)[name]) for i in range(50) for name in "ab"} == {4}
    assert {columns("larger", i, digits=1)["a"] for i in range(400)} == set("0123456789")
    numbers = [columns("larger", i, digits=1) for i in range(400)]
    assert all(row["a"] != row["b"] for row in numbers)
    assert 0.4 < sum(int(row["a"]) > int(row["b"]) for row in numbers) / 400 < 0.6  # the answer's place gives nothing away


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TaskSource(task="sotr"), "unknown task 'sotr': expected sort, larger, reverse or reasoning_gym:NAME; did you mean 'sort'?"),
        (TaskSource(task="sort", options={"digit": 6}), "did you mean 'digits'?"),
        (TaskSource(task="sort", options={"digits": 0}), "greater than 0"),
        (TaskSource(task="larger", options={"digits": 0}), "greater than or equal to 1"),
    ],
)
def test_wrong_task_or_option(source: TaskSource, message: str) -> None:
    with pytest.raises(UserError) as caught:
        task_rows(source)
    assert message in str(caught.value)


def test_reasoning_gym_is_an_extra() -> None:
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=re.escape(install("reasoning-gym"))):
            task_rows(TaskSource(task="reasoning_gym:leg_counting"))
        return
    rows, again = (task_rows(TaskSource(task="reasoning_gym:leg_counting", seed=3)) for _ in range(2))
    assert rows.row(7) == again.row(7) != rows.row(8) and rows.length == 1_000_000
    assert rows.row(7).columns["answer"].isdigit() and rows.row(7).columns["completion"] == rows.row(7).columns["answer"]
    with pytest.raises(UserError, match="nope"):
        task_rows(TaskSource(task="reasoning_gym:nope"))
