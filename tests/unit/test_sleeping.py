"""What sleeps lies in the host's memory in chunks, and comes back where it was."""

from __future__ import annotations

import pytest
import torch

from drumroll.backends import sleeping
from drumroll.backends.sleeping import Sleeper


@pytest.mark.parametrize("chunk", [1, 24, 64, 1 << 28])
def test_storages_lie_across_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages of 40, 8 and 52 bytes, one seen through two views, and an empty one."""
    monkeypatch.setattr(sleeping, "_CHUNK_BYTES", chunk)
    wide, narrow, odd, empty = torch.arange(10.0), torch.tensor([7]), torch.arange(13, dtype=torch.int32), torch.empty(0)
    tensors = [wide, wide[3:5], narrow, odd, empty]
    before = [tensor.clone() for tensor in tensors]
    sleeper = Sleeper(torch.device("cpu"))
    sleeper.sleep("parameter", tensors)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 5
    host = sleeper._asleep["parameter"].host
    assert [len(part) for part in host] == [chunk] * (100 // chunk) + [100 % chunk] * bool(100 % chunk)
    sleeper.wake()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
