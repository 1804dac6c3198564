"""The command line as tests run it: in a process of its own, gone at the latest with the one that runs the test, or within that one.

Within it nothing is imported again: that is 4 s of a processor for the driver, and as many for the server that ranks are forked from.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from drumroll.cli import main

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
SMALL = ["warmup.steps=70", "rollout.prompts_per_step=8", "algorithm.group_size=4", "eval.rows=16"]
MAIN = [sys.executable, "-c", "from drumroll.cli import main; main()"]
PR_SET_PDEATHSIG = 1


def _end_with_test() -> None:
    """A time-out of pytest ends the process that runs the test at once, without a chance to kill what it has started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def drumroll(*arguments: str, code: int = 0) -> str:
    """What the command line prints, in a process of its own. It must end with `code`."""
    command = [*MAIN, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, preexec_fn=_end_with_test)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def drumroll_here(*arguments: str, code: int = 0) -> str:
    """What the command line prints, in this process. It must end with `code`."""
    said, ended = io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["drumroll", *arguments]), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as error:
            ended = int(error.code or 0)
    assert ended == code, f"exit code {ended}, expected {code}\n{said.getvalue()}"
    return said.getvalue()


@contextlib.contextmanager
def running(*arguments: str, prepare: Callable[[], None] = lambda: None) -> Iterator[subprocess.Popen[str]]:
    """The driver, in a process group of its own, with all it prints on its `stdout`. `prepare` runs in its process before it starts."""

    def before() -> None:
        _end_with_test()
        prepare()

    with subprocess.Popen(
        [*MAIN, *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=before,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def assert_group_is_gone(process: subprocess.Popen[str]) -> None:
    """The server that ranks are forked from ends a moment after its driver."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("something is left of the process group")
