"""The test tool itself: results by rank, the first failure, the time-out, nothing left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import Failed, RankFailure, first_of, run_ranks


def add_up(rank: int, world_size: int, start: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(start + rank)])
    dist.all_reduce(total)
    return rank, total, os.getpid()


def fail_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError("the first failure")
    dist.barrier()


def die_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os._exit(7)
    time.sleep(60)


def hang(rank: int, world_size: int) -> None:
    time.sleep(60)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # not our child: init reaps it when it likes
    except psutil.NoSuchProcess:
        return False


def test_results_come_in_rank_order_and_no_process_is_left() -> None:
    results = run_ranks(add_up, 2, 10)
    assert [(rank, total.item()) for rank, total, _ in results] == [(0, 21.0), (1, 21.0)]
    assert not any(psutil.pid_exists(pid) for _, _, pid in results)


def test_the_first_failure_is_the_one_reported() -> None:
    with pytest.raises(RankFailure, match="rank 1: ValueError"):
        run_ranks(fail_on_last, 2)


def test_who_has_lost_a_peer_is_not_blamed_for_knowing_it_first() -> None:
    lost = Failed(1.0, "rank 0: RuntimeError('Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:1')")
    died, later = Failed(1.2, "rank 1 died without a word, exit code 7"), Failed(1.3, "rank 2: ValueError('also')")
    assert first_of([lost, later, died]) is died
    assert first_of([lost]) is lost


def test_a_killed_rank_and_a_hang_end_the_call() -> None:
    with pytest.raises(RankFailure, match="rank 1 died without a word, exit code 7"):
        run_ranks(die_on_last, 2)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"time-out: ranks \[0, 1\] of 2"):
        run_ranks(hang, 2, timeout=1.5)
    assert time.monotonic() - start < 10


def test_a_time_out_of_a_test_names_it_shows_where_it_stood_and_leaves_no_rank(repository: Path, tmp_path: Path) -> None:
    """Beside others, as `make test` runs them: the process is ended at once, another takes the tests that are left."""
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "worksteal", f"--basetemp={tmp_path}", "tests/unit/hanging.py"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED tests/unit/hanging.py::test_that_hangs - worker 'gw0' crashed" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "time-out after 5 s: tests/unit/hanging.py::test_that_hangs\n" in done.stderr
    assert "about to hang\n" in done.stderr and "in _collect\n" in done.stderr
    pids = [int(file.read_text()) for file in tmp_path.rglob("*.pid")]
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(map(lives, pids))
