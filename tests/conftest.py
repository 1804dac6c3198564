"""Markers come from the directory; one thread a process; nothing reaches a model hub; a time-out says where its test stood."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

# Before torch is imported by any test: the runs start several processes, and threads beyond the cores make everything many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import pytest_timeout

TESTS = Path(__file__).parent
KINDS = ("unit", "contract", "e2e", "architecture")
SECONDS = {"contract": 300, "e2e": 600}  # time-outs that differ from the one in pyproject.toml


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = item.path.relative_to(TESTS).parts[0]
        if kind in KINDS:
            item.add_marker(kind)
        if kind in SECONDS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS[kind]))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """The plug-in's timer, but for tests in processes of pytest-xdist: what it would print goes nowhere there."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    timer = threading.Timer(settings.timeout, _time_out, (item, settings))
    timer.daemon = True
    timer.start()
    item.cancel_timeout = timer.cancel
    return True


def _time_out(item: pytest.Item, settings: Any) -> None:
    """Name, output and stacks to standard error, then end this process, for which pytest-xdist starts another."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture()
    os.dup2(2, 1)
    print(f"\ntime-out after {settings.timeout:g} s: {item.nodeid}", flush=True)
    pytest_timeout.timeout_timer(item, settings)


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
