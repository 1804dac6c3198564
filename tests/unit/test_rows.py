"""Rows of a tensor as torch.distributed sees them."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from drumroll.backends import clip, state
from drumroll.backends.rows import Rows
from tests.ranks import run_ranks


def off_loaded(rank: int, ranks: int, folder: Path) -> tuple[bool, float, torch.Tensor]:
    """Rows in host memory under a GPU's mesh, as gradients and moments that are off-loaded: clipped, saved, spoilt and loaded."""
    rows = Rows(init_device_mesh("cuda", (ranks,)))  # without a GPU it is as good: nothing lies there
    whole = torch.arange(10.0).view(5, 2)
    piece = rows.cut(whole).clone()
    seen = rows.dtensor(piece, whole.shape)
    same = seen.to_local().data_ptr() == piece.data_ptr()
    norm = clip.global_norm([seen])
    clip.clip_([seen], norm, norm / 2)
    state.save(folder, {"model.w": seen})
    piece.fill_(-1.0)
    state.load(folder, {"model.w": seen}, (state.MODEL,))
    return same, norm, piece


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks and a mesh of GPUs: made where there is none")
def test_rows_in_host_memory_are_no_copies_on_the_device(tmp_path: Path) -> None:
    """Failure cases 16 and 38: a copy would be clipped in place of the gradient, and filled in place of the moments."""
    found = run_ranks(off_loaded, 2, tmp_path)
    whole = torch.arange(10.0).view(5, 2)
    assert [(same, norm) for same, norm, _ in found] == [(True, pytest.approx(float(whole.norm())))] * 2
    torch.testing.assert_close(torch.cat([piece for _, _, piece in found]), whole / 2, rtol=1e-6, atol=0)
