"""Markers come from the directory; one thread a process; nothing reaches a model hub."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported by any test: the runs start several processes, and threads beyond the cores make everything many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

TESTS = Path(__file__).parent
KINDS = ("unit", "contract", "e2e", "architecture")
SECONDS = {"e2e": 600}  # time-outs that differ from the one in pyproject.toml


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)
        if kind in SECONDS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS[kind]))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return TESTS.parent
