"""The reduce-scatter that fsdp2 uses over gloo: sums and means of parts, in the same bits every time."""

import pytest
import torch
import torch.distributed as dist

from drumroll.backends.ring import RingReduceScatter
from tests.ranks import run_ranks

RANKS = 3


def parts(rank: int) -> torch.Tensor:
    return torch.randn(RANKS * 5, generator=torch.Generator().manual_seed(rank))


def reduced(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    reduce, group = RingReduceScatter(), dist.group.WORLD
    assert group is not None
    total, again, mean = (reduce.allocate((5,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(3))
    reduce(total, parts(rank), group, dist.ReduceOp.SUM)
    reduce(again, parts(rank), group, dist.ReduceOp.SUM)
    reduce(mean, parts(rank), group, dist.ReduceOp.AVG)
    with pytest.raises(NotImplementedError, match="a sum or a mean"):
        reduce(total, parts(rank), group, dist.ReduceOp.MAX)
    return total, mean, torch.equal(total, again)


def test_each_rank_has_its_part_of_the_sum() -> None:
    found = run_ranks(reduced, RANKS)
    expected = torch.stack([parts(rank) for rank in range(RANKS)]).double().sum(0)
    torch.testing.assert_close(torch.cat([total for total, _, _ in found]).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([mean for _, mean, _ in found]).double(), expected / RANKS, rtol=1e-6, atol=1e-6)
    assert all(same for _, _, same in found)
