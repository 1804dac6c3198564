"""How a rank joins the process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from drumroll.backends.base import RankContext

COLLECTIVE_S = 60.0  # a collective gives up so much later than the driver, who can say more about it


def join(rank: int, world_size: int, device: str, store: dist.Store, timeout_s: float) -> RankContext:
    """This process's place in the group, once all are there. Ranks share the cores: one thread each on a CPU, beside a GPU equal parts."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + COLLECTIVE_S),
    )
    return RankContext(rank=rank, world_size=world_size, device=torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
