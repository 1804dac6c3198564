"""A test that hangs with ranks of its own, and one after it. Run by test_ranks.py alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks


def ready(rank: int, world_size: int) -> int:
    return rank


def hang(rank: int, world_size: int, folder: Path) -> None:
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture
def server() -> None:
    """Ranks start from it: to have it started is not what the time-out is about."""
    assert run_ranks(ready, 1) == [0]


@pytest.mark.timeout(5, func_only=True)
@pytest.mark.usefixtures("server")
def test_that_hangs(tmp_path: Path) -> None:
    print("about to hang")
    run_ranks(hang, 2, tmp_path)


def test_after_it() -> None:
    pass
