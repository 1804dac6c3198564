"""The test tool itself: results by rank, the first failure, the time-out, nothing left running."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


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


def test_results_come_in_rank_order_and_no_process_is_left() -> None:
    results = run_ranks(add_up, 2, 10)
    assert [(rank, total.item()) for rank, total, _ in results] == [(0, 21.0), (1, 21.0)]
    assert not any(psutil.pid_exists(pid) for _, _, pid in results)


def test_the_first_failure_is_the_one_reported() -> None:
    with pytest.raises(RankFailure, match="rank 1: ValueError"):
        run_ranks(fail_on_last, 2)


def test_a_killed_rank_and_a_hang_end_the_call() -> None:
    with pytest.raises(RankFailure, match="rank 1 died without a word, exit code 7"):
        run_ranks(die_on_last, 2)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"time-out: ranks \[0, 1\] of 2"):
        run_ranks(hang, 2, timeout=1.5)
    assert time.monotonic() - start < 10
