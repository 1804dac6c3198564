"""The local runtime: typed calls in rank order; the first failure ends the run in seconds, names its rank, leaves nothing behind."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from drumroll.backends.base import RankContext
from drumroll.errors import RunError, UserError
from drumroll.runtime.failure import RankFailure
from drumroll.runtime.group import COLLECTIVE_S
from drumroll.runtime.local import launch
from drumroll.runtime.memory import words_of_kill

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
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "memory":
                room = 256 << 20  # beyond what is mapped: without it the loader aborts before torch can say a word
                hard = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, hard))
                torch.zeros(1 << 32)
            if how == "other collective":
                dist.recv(torch.zeros(1), src=0)
        dist.barrier()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def take(self, load: bytes) -> int:
        return len(load)

    def stop(self, rank: int) -> None:
        """Answers, and is stopped before the next call."""
        if self.ctx.rank == rank:
            signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGSTOP))
            signal.setitimer(signal.ITIMER_REAL, 0.2)

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


def test_a_rank_without_memory_says_so_and_what_to_do():
    handle = launch(Probe, 2, device="cpu")
    with pytest.raises(RankFailure, match=r"rank 1 failed first:\nout of memory: lower train\.micro_batch_tokens(.|\n)*allocate") as caught:
        handle.call(Probe.misbehave, 1, "memory")
    assert caught.value.stacks == ""


def test_what_is_said_of_a_kill_depends_on_whether_memory_ran_out():
    assert "memory ran out, and the kernel chose it" in words_of_kill(signal.SIGKILL, 3, 4)
    assert "not for want of memory" in words_of_kill(signal.SIGKILL, 3, 3)
    assert "kills the largest process when memory runs out" in words_of_kill(signal.SIGKILL, None, None)
    assert words_of_kill(signal.SIGSEGV, 3, 4) == "was killed by SIGSEGV"


@pytest.mark.parametrize(
    ("how", "why", "where"),
    [
        ("sleep", r"no answer from ranks \[1\]; ranks \[0, 2\] wait for them in a collective", r"rank 1: misbehave \(test_local_runtime"),
        ("stop", r"no answer from ranks \[1\]; ranks \[0, 2\] wait", r"rank 1: gave no stack within"),
        ("other collective", r"ranks \[0, 1, 2\] all wait in a collective, which is not the same", r"rank 1: recv \(distributed_c10d"),
    ],
)
def test_silence_ends_the_run_at_the_deadline_and_everybody_says_where_they_stand(how, why, where):
    """Failure case 58, as it looks when it happens: ranks in different collectives; and one that others wait for."""
    handle = launch(Probe, 3, device="cpu", timeout_s=100)
    handle._timeout_s = 2  # type: ignore[attr-defined]  # starting may take longer
    start = time.monotonic()
    silent = rf"rank [01] failed first:\nsilent for 2 s .runtime.timeout_s. in Probe.misbehave: {why}"
    with pytest.raises(RankFailure, match=silent) as caught:
        handle.call(Probe.misbehave, 1, how)
    assert time.monotonic() - start < 2 + 10 < COLLECTIVE_S
    words = str(caught.value)
    assert re.search(where, words)
    assert "driver: " in words and "rank 0: barrier (distributed_c10d" in words
    assert all(f"== {who}\n" in caught.value.stacks for who in ("rank 0", "rank 1", "rank 2", "driver"))
    assert caught.value.stacks.count("Thread") >= 4  # all threads, not the main ones alone


def test_a_rank_that_does_not_read_does_not_hold_the_driver():
    """More than a pipe takes in."""
    handle = launch(Probe, 2, device="cpu", timeout_s=100)
    handle.call(Probe.stop, 1)
    time.sleep(1.0)
    handle._timeout_s = 2  # type: ignore[attr-defined]
    with pytest.raises(RankFailure, match=r"rank 1 failed first:\nsilent for 2 s .* in Probe.take: no answer from ranks \[1\]"):
        handle.call(Probe.take, bytes(1 << 22))
    with pytest.raises(RankFailure, match="the ranks have ended"):
        handle.call(Probe.take, b"")


def test_one_rank_in_the_drivers_process_says_so_too(capfd: pytest.CaptureFixture[str]) -> None:
    """That memory ran out, and what to do; where it stands when it is silent, without being ended. Other errors stay what they are."""
    with launch(Probe, 1, device="cpu", timeout_s=0.3) as handle:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        try:
            with pytest.raises(RankFailure, match=r"rank 0 failed first:\nout of memory: lower train\.micro_batch_tokens(.|\n)*allocate"):
                handle.call(Probe.misbehave, 0, "memory")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        with pytest.raises(ValueError, match="bad row 17"):
            handle.call(Probe.misbehave, 0, "raise")
        assert "misbehave" not in capfd.readouterr().err
        handle.call(Probe.rest, 0.7)
        said = capfd.readouterr().err
        assert said.count("in rest") == 2 and "Timeout (0:00:00.300000)!" in said
        time.sleep(0.4)
        assert capfd.readouterr().err == ""  # nobody is called


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
