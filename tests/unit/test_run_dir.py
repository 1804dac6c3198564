"""Where a run writes: what cannot be written to is bad input, said before anything starts; a batch of nothing is a batch."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumroll import config
from drumroll.errors import RunError, UserError
from drumroll.observe import batches
from drumroll.observe.run import CONFIG_FILE, SUMMARY_FILE, read_events
from drumroll.observe.summary import read_summary
from drumroll.pipelines.run_dir import claim, make_room, undo
from drumroll.pipelines.session import open_session
from drumroll.rewards.failure import RewardFailure
from tests.records import healthy_record


@pytest.mark.parametrize("where", ["/proc/no-such", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_bad_input(where: str) -> None:
    with pytest.raises(UserError, match=f"run_dir: cannot write into {where}"):
        make_room(Path(where))


def test_a_batch_that_cannot_be_written_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"cannot write the batch.*record\.batches=false"):
        batches.write(Path("/proc/no-such/step.npz"), [])


def test_a_batch_of_nothing_comes_back_as_nothing(tmp_path: Path) -> None:
    batches.write(tmp_path / "b.npz", [])
    assert batches.read(tmp_path / "b.npz") == []


def test_one_process_a_run(tmp_path: Path) -> None:
    """Neither a second new run nor a resumed one takes a directory from under a run that lives; when it has ended both may."""
    run_dir = tmp_path / "run"
    held, kept = make_room(run_dir)
    assert kept is None
    for again in (claim, make_room):
        with pytest.raises(UserError, match=rf"run_dir: another process runs in {run_dir}; wait until it has ended"):
            again(run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    held.close()
    claim(run_dir).close()
    held, kept = make_room(run_dir)
    assert kept == tmp_path / "run.1"
    claim(kept).close()  # what was moved is nobody's
    with pytest.raises(UserError, match="another process"):
        claim(run_dir)
    held.close()


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_a_directory_that_moves_between_opening_and_locking_is_not_held(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process puts this run aside in that moment: the lock would be on what was put aside."""
    run_dir = tmp_path / "run"
    make_room(run_dir)[0].close()
    flock = fcntl.flock

    def moved_first(*args: Any) -> None:
        if not (tmp_path / "run.1").exists():
            run_dir.rename(tmp_path / "run.1")
            if there == "another run":
                make_room(run_dir)[0].close()
        flock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", moved_first)
        with pytest.raises(UserError, match=rf"run_dir: another process has just moved {run_dir}; start again"):
            claim(run_dir)
    claim(tmp_path / "run.1").close()  # nothing of it is still held


def test_behind_a_link_it_is_the_directory_that_is_kept_made_new_and_put_back(tmp_path: Path) -> None:
    """The link to a large disk stays one: also to a place that is not there yet."""
    disk, link = tmp_path / "disk" / "run", tmp_path / "link"
    link.symlink_to(disk)
    make_room(link)[0].close()
    (disk / CONFIG_FILE).write_text("first")
    held, kept = make_room(link)
    assert kept == tmp_path / "disk" / "run.1"
    assert link.is_symlink() and link.resolve() == disk
    assert ((kept / CONFIG_FILE).read_text(), (disk / CONFIG_FILE).read_text()) == ("first", "")
    undo(link, kept)
    assert (disk / CONFIG_FILE).read_text() == "first" and not kept.exists()
    held.close()


def test_the_traceback_of_a_reward_that_ended_the_run_is_kept_in_its_events(tmp_path: Path) -> None:
    """The error itself is one line, in the summary as on the command line."""
    what = {"model": {"path": "m"}, "data": {"train": {"task": "sort"}}, "backend": {"name": "single"}, "record": {"tensorboard": False}}
    run = config.parse({"pipeline": "sft", "max_steps": 2, "run_dir": str(tmp_path / "run"), **what})

    def train() -> None:
        with open_session(run) as session:
            session.recorder.step(replace(healthy_record(1), phase="sft"))
            raise RewardFailure("reward mine failed", "Traceback (most recent call last):\nKeyError: 'x'\n")

    with pytest.raises(RewardFailure):
        train()
    (event,) = read_events(tmp_path / "run")
    assert (event.step, event.kind, event.text) == (1, "reward", "Traceback (most recent call last):\nKeyError: 'x'")
    summary = read_summary(tmp_path / "run" / SUMMARY_FILE)
    assert summary is not None
    assert (summary.status, summary.error) == ("failed", "RewardFailure: reward mine failed")
