"""Parameters that every rank holds whole: what the backends with replicated parameters share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumroll.backends.buckets import buckets
from drumroll.backends.rows import Cut, Rows, gather
from drumroll.digest import digest
from drumroll.errors import RunError
from drumroll.models.scorer import Scorer

GATHER_BYTES = 32 << 20  # of parameters brought in line at a time


def all_reducing(scorer: Scorer, bucket_mb: float) -> DistributedDataParallel:
    """The scorer under torch's DDP: gradients are averaged in buckets while backward goes on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # torch 2.11 has no other name for it
        return DistributedDataParallel(
            scorer,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,  # else every gradient exists twice
            broadcast_buffers=False,
            init_sync=False,  # a broadcast would hide ranks that loaded something else; `check_replicas` says so instead
        )


def share_rows(rows: Rows, parameters: Sequence[nn.Parameter]) -> None:
    """Every rank has stepped its own rows of each parameter: bring everybody's to everybody, in place. Collective."""
    if rows.ranks == 1:
        return
    for bucket in buckets(parameters, lambda parameter: parameter.nbytes, GATHER_BYTES):
        mine = [parameter.detach() for parameter in bucket]
        torch._foreach_copy_(mine, gather([rows.cut(tensor) for tensor in mine], [Cut(rows, tensor.shape) for tensor in mine]))


def check_replicas(scorer: Scorer, device: torch.device) -> None:
    """Raises RunError on all ranks when a parameter or buffer differs between two of them. Collective."""
    named = [*scorer.named_parameters(), *scorer.named_buffers()]
    low = torch.tensor([digest(tensor) >> 1 for _, tensor in named], dtype=torch.int64, device=device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if different := [name for (name, _), equal in zip(named, (low == high).tolist(), strict=True) if not equal]:
        raise RunError(
            f"{len(different)} of {len(named)} tensors differ between ranks after loading, first {different[0]}; "
            "do all ranks read the same folder?"
        )
