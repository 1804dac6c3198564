"""Which failures a run is started again after, how often, and from where. Whole runs: tests/e2e/test_failures.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumroll import config as configs
from drumroll import plugins
from drumroll.checkpoint.store import CannotWrite
from drumroll.config import RunConfig
from drumroll.errors import RunError, UserError
from drumroll.pipelines.restart import with_restarts
from drumroll.pipelines.resume import Resumed
from drumroll.runtime.failure import RankFailure


def run(run_dir: Path, restarts: int) -> RunConfig:
    return configs.parse(
        {
            "pipeline": "sft",
            "max_steps": 4,
            "run_dir": str(run_dir),
            "model": {"path": "m"},
            "data": {"train": {"task": "sort"}},
            "backend": {"name": plugins.SPECIFICATION_BACKEND},
            "runtime": {"max_restarts": restarts},
            "checkpoint": {"every": 1},
        }
    )


class Attempts:
    """Fails with each of `errors` in turn, then comes to its end."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.seen: list[tuple[Resumed | None, str]] = []

    def __call__(self, resumed: Resumed | None, restart: str) -> None:
        self.seen.append((resumed, restart))
        if self.errors:
            raise self.errors.pop(0)


def test_as_often_as_it_may_and_each_says_which_it_is_and_why(tmp_path: Path) -> None:
    attempts = Attempts(RankFailure("rank 1 failed first: a"), RankFailure("rank 0 failed first: b"))
    with_restarts(attempts, run(tmp_path, 2), None)
    assert attempts.seen == [
        (None, ""),
        (None, "restart 1 of at most 2 (runtime.max_restarts): rank 1 failed first: a"),
        (None, "restart 2 of at most 2 (runtime.max_restarts): rank 0 failed first: b"),
    ]
    one_too_many = Attempts(RankFailure("a"), RankFailure("b"))
    with pytest.raises(RankFailure, match=r"^b$"):
        with_restarts(one_too_many, run(tmp_path, 1), None)


@pytest.mark.parametrize("error", [UserError("no such folder"), RunError("max_skips"), CannotWrite("full"), KeyboardInterrupt()])
def test_what_is_no_failure_of_a_rank_is_not_tried_again(error: Exception, tmp_path: Path) -> None:
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        with_restarts(attempts, run(tmp_path, 3), None)
    assert len(attempts.seen) == 1


def test_without_a_checkpoint_to_go_on_from_the_first_cause_is_still_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    attempts = Attempts(RankFailure("rank 1 failed first: a", stacks="== rank 1"))
    with pytest.raises(RankFailure, match=r"rank 1 failed first: a\nno restart: (.|\n)*its save was not finished") as caught:
        with_restarts(attempts, run(tmp_path, 3), None)
    assert caught.value.stacks == "== rank 1"
