"""The local runtime: typed calls in rank order; the first failure ends the run in seconds, names its rank, leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from drumroll.backends.base import RankContext
from drumroll.errors import RunError, UserError
from drumroll.runtime.local import launch

pytestmark = pytest.mark.timeout(120)


@dataclass
class Probe:
    ctx: RankContext

    def rank_and_sum(self, value: float) -> tuple[int, float]:
        total = torch.tensor([value * (self.ctx.rank + 1)])
        dist.all_reduce(total)
        return self.ctx.rank, float(total)

    def misbehave(self, rank: int, how: str) -> None:
        if self.ctx.rank == rank:
            if how == "raise":
                raise ValueError("bad row 17")
            if how == "user":
                raise UserError("model.path: no such folder")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(7)
            if how == "sleep":
                time.sleep(600)
        dist.barrier()

    def close(self) -> None: ...


class BrokenStart(Probe):
    def __init__(self, ctx: RankContext) -> None:
        if ctx.rank == 1:
            raise RuntimeError("cannot build the model")


def children() -> list[psutil.Process]:
    """Ranks that still live: grandchildren, below the server they are forked from."""
    return [rank for server in psutil.Process().children() if "forkserver" in " ".join(server.cmdline()) for rank in server.children()]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert children() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_come_in_rank_order_and_collectives_reach_everybody(ranks):
    with launch(Probe, ranks, device="cpu") as handle:
        assert handle.call(Probe.rank_and_sum, 2.0) == [(r, 2.0 * sum(range(1, ranks + 1))) for r in range(ranks)]
        assert handle.scatter(Probe.rank_and_sum, [(float(r),) for r in range(ranks)])[0][1] == sum(r * (r + 1) for r in range(ranks))


# Failure case 59.
@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "ValueError: bad row 17"), ("kill", "SIGKILL"), ("exit", "exited with code 7")],
)
def test_the_first_failure_ends_all_ranks_in_seconds_with_its_own_words(how, words):
    handle = launch(Probe, 3, device="cpu")
    start = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 failed first") as caught:
        handle.call(Probe.misbehave, 1, how)
    assert time.monotonic() - start < 8
    assert words in str(caught.value)
    handle.close()  # closing after a failure is harmless


def test_a_silent_rank_ends_the_run_at_the_deadline():
    handle = launch(Probe, 2, device="cpu", timeout_s=30)
    handle._timeout_s = 2  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"silent for 2 s"):
        handle.call(Probe.misbehave, 1, "sleep")


def test_a_user_error_on_a_rank_stays_a_user_error():
    handle = launch(Probe, 2, device="cpu")
    with pytest.raises(UserError, match=r"^model\.path: no such folder$"):
        handle.call(Probe.misbehave, 0, "user")


def test_a_rank_that_cannot_start_says_why():
    with pytest.raises(RunError, match=r"rank 1 failed first(.|\n)*cannot build the model"):
        launch(BrokenStart, 2, device="cpu")


def test_more_ranks_than_gpus_is_a_user_error():
    with pytest.raises(UserError, match=r"runtime\.ranks=1000"):
        launch(Probe, 1000, device="cuda")
