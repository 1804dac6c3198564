"""Streams: every row once an epoch, cursors that lose and repeat nothing, evaluation of every row exactly once."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from drumroll.config import DataConfig, TaskSource
from drumroll.data.rows import Row
from drumroll.data.sources import LoadedRows
from drumroll.data.stream import Cursor, PromptStream, SampleStream, epoch_order, eval_prompts
from drumroll.data.tasks import task_rows
from drumroll.errors import UserError
from drumroll.models.builtin import tokenizer as char_tokenizer

TOKENIZER = char_tokenizer()
EOS = (2,)


def rows(count: int) -> LoadedRows:
    return LoadedRows([Row(f"r:{i}", {"prompt": f"{i}", "completion": "x" * (1 + i % 5), "index": i}) for i in range(count)])


def data(**options: object) -> DataConfig:
    return DataConfig.model_validate({"train": {"path": "unused"}, "completion": "completion", **options})


def stream(count: int = 20, seed: int = 0, **options: object) -> PromptStream:
    return PromptStream(rows(count), TOKENIZER, data(**options), seed)


def drawn(source: PromptStream, count: int) -> list[int]:
    return [prompt.columns["index"] for prompt in source.draw(count)]


def test_each_epoch_is_a_new_order_of_all_rows() -> None:
    ids = drawn(stream(), 60)
    epochs = [ids[:20], ids[20:40], ids[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert drawn(stream(), 60) == ids
    assert drawn(stream(seed=1), 60) != ids
    assert drawn(stream(shuffle=False), 40) == [*range(20), *range(20)]


def test_the_order_is_pinned_and_even() -> None:
    """A pure function of (seed, epoch, length) in any version of any library; every place is equally likely for row 0."""
    assert epoch_order(10, 0, 0, True).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert epoch_order(10, 0, 1, True).tolist() == [9, 7, 0, 1, 6, 3, 4, 5, 2, 8]
    places = np.bincount([int(np.argmin(epoch_order(10, seed, epoch, True))) for seed in range(20) for epoch in range(100)], minlength=10)
    assert abs(places - 200).max() < 60  # 4.5 standard deviations of 2000 throws at 10 places


def test_group_ids_are_serial_and_never_used_again() -> None:
    source = stream()
    assert [prompt.group_id for prompt in source.draw(7) + source.draw(50)] == list(range(57))


@pytest.mark.parametrize("stops", [(3, 7), (3, 7, 7), (19, 20, 21), (20,), (1, 39), (0, 40)])
def test_case_42_stop_and_resume_lose_and_repeat_nothing(stops: tuple[int, ...]) -> None:
    """20 rows, two epochs: the ids over (stop, resume, stop, resume) are those of the uninterrupted run, batches of 2 as well as of 1."""
    whole = [(p.group_id, p.columns["index"]) for p in stream().draw(40)]
    seen, cursor = [], Cursor()
    for begin, end in zip((0, *stops), (*stops, 40), strict=True):
        resumed = stream()
        resumed.restore(cursor)
        for at in range(begin, end, 2):
            seen += [(p.group_id, p.columns["index"]) for p in resumed.draw(min(2, end - at))]
        cursor = resumed.state()
    assert seen == whole


def test_a_cursor_of_other_data_is_refused() -> None:
    source = stream(20)
    source.draw(33)
    with pytest.raises(UserError, match="the data has 19 rows; the saved stream stood at row 13 of epoch 1 after 33 draws"):
        stream(19).restore(source.state())


def test_an_endless_task_resumes_too() -> None:
    def tasks() -> PromptStream:
        return PromptStream(task_rows(TaskSource(task="sort")), TOKENIZER, data(), seed=5)

    whole = [p.prompt_id for p in tasks().draw(9)]
    assert whole == [f"sort:0:{i}" for i in range(9)]
    first = tasks()
    first.draw(4)
    second = tasks()
    second.restore(first.state())
    assert [p.prompt_id for p in second.draw(5)] == whole[4:]


def test_too_long_prompts_are_left_out_and_counted_once_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    source = stream(200, max_prompt_tokens=3)  # BOS and two digits: 100 rows fit
    with caplog.at_level(logging.WARNING):
        ids = drawn(source, 200)
    assert sorted(ids) == sorted([*range(100), *range(100)])
    state = source.state()
    assert 100 <= state.left_out <= 200 and state.draws == 200 + state.left_out
    warning = "left out a prompt of more than 3 tokens (data.max_prompt_tokens); counted from here on"
    assert [r.getMessage() for r in caplog.records] == [warning]


def test_a_source_of_which_nothing_fits_is_an_error_not_a_hang() -> None:
    with pytest.raises(UserError, match="none of 20 rows in a row can be used"):
        stream(max_prompt_tokens=1).draw(1)
    with pytest.raises(UserError, match="none of 10000 rows"):
        PromptStream(task_rows(TaskSource(task="sort")), TOKENIZER, data(max_prompt_tokens=3), 0).draw(1)


@pytest.mark.parametrize("seed", range(8))
def test_one_usable_row_among_many_is_found_in_every_epoch(seed: int) -> None:
    """It may be drawn first in one epoch and last in the next, with more than an epoch's worth of others between."""
    mixed = LoadedRows([Row(f"r:{i}", {"prompt": "1" if i == 0 else "1" * 50, "completion": "x", "index": i}) for i in range(6)])
    source = PromptStream(mixed, TOKENIZER, data(max_prompt_tokens=3), seed)
    assert drawn(source, 20) == [0] * 20


def test_case_5_samples_without_a_target_are_left_out_counted_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A longest length that cuts whole completions away must not make samples whose loss is 0/0."""
    long = LoadedRows([Row("long", {"prompt": "abcdef", "completion": "xy"}), Row("short", {"prompt": "a", "completion": "xyz"})])
    source = SampleStream(long, TOKENIZER, data(shuffle=False), EOS, max_length=5, seed=0)
    with caplog.at_level(logging.WARNING):
        samples = source.draw(3)
    assert [s.n_targets for s in samples] == [3, 3, 3]  # BOS a | x y z, and the EOS is cut away
    assert [s.group_id for s in samples] == [1, 3, 5]
    assert source.state() == Cursor(epoch=2, position=2, draws=6, left_out=3, truncated=6)
    assert any("left out 3 samples that have nothing to learn within 5 tokens (3 so far)" in r.getMessage() for r in caplog.records)
    resumed = SampleStream(long, TOKENIZER, data(shuffle=False), EOS, max_length=5, seed=0)
    resumed.restore(source.state())
    assert resumed.draw(1)[0].group_id == 7
    only_long = SampleStream(LoadedRows(long.rows[:1]), TOKENIZER, data(), EOS, max_length=5, seed=0)
    with pytest.raises(UserError, match="nothing to learn"):
        only_long.draw(1)


def test_evaluation_prompts_are_every_row_once_in_file_order() -> None:
    """Case 31's rows; that ranks and metric keep each of them once is `tests/contract/test_policy.py`."""
    made = eval_prompts(rows(200), TOKENIZER, data(), limit=1000)
    assert [p.columns["index"] for p in made.prompts] == list(range(200))
    assert all(p.stream == "eval" and p.group_id == p.columns["index"] for p in made.prompts)


def test_evaluation_of_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data.eval: none of 20 rows can be used"):
        eval_prompts(rows(20), TOKENIZER, data(max_prompt_tokens=1), limit=64)
    some = eval_prompts(rows(20), TOKENIZER, data(max_prompt_tokens=2), limit=64)
    assert (len(some.prompts), some.left_out) == (10, 10)
    endless = eval_prompts(task_rows(TaskSource(task="sort", seed=1)), TOKENIZER, data(), limit=64)
    assert [p.prompt_id for p in endless.prompts] == [f"sort:1:{i}" for i in range(64)]
