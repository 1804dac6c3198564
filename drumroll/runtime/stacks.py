"""Where every process of a run stands when one falls silent.

A signal makes a rank write the stacks of all its threads into a file of its own. `faulthandler` does that in C, so it works from inside a
collective that never ends; a process that is stopped, or that hangs in the kernel, writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

SIGNAL = signal.SIGUSR1
WAIT_S = 2.0  # how long ranks may take to write
QUIET_S = 0.2  # a file that has not grown for so long is complete
FRAMES = 6  # of a stack, in words

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_COLLECTIVES = "/torch/distributed/"


def register(file: Path) -> None:
    """In a rank: write all stacks to `file` whenever SIGNAL comes."""
    faulthandler.register(SIGNAL, file=file.open("w"), all_threads=True)  # keeps the file open


def of_ranks(pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """Rank -> stacks of its threads, the main thread's last; empty where it does not answer. `pids`: rank -> process."""
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    files = {rank: file_of(folder, rank) for rank in pids}
    deadline, before, since = time.monotonic() + WAIT_S, [0], time.monotonic()
    while time.monotonic() < deadline:
        sizes = [file.stat().st_size if file.is_file() else 0 for file in files.values()]
        if sizes != before:
            before, since = sizes, time.monotonic()
        elif all(sizes) and time.monotonic() - since > QUIET_S:
            break
        time.sleep(0.02)
    return {rank: file.read_text(errors="replace") if file.is_file() else "" for rank, file in files.items()}


def of_this_process(folder: Path) -> str:
    """Stacks of all threads of the caller's process, the main thread's last."""
    file = folder / "driver"
    with file.open("w") as out:
        faulthandler.dump_traceback(out, all_threads=True)
    return file.read_text(errors="replace")


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank-{rank}"


def in_words(stacks: str) -> str:
    """The main thread's innermost frames in one line."""
    frames = [f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})" for frame in _main(stacks)]
    more = " < ..." if len(frames) > FRAMES else ""
    return " < ".join(frames[:FRAMES]) + more if frames else f"gave no stack within {WAIT_S:g} s: stopped, or stuck in the kernel"


def waits_for_others(stacks: str) -> bool:
    """Whether the main thread is inside a collective: of a few frames, the innermost ones may be those of a dispatcher."""
    return any(_COLLECTIVES in frame["file"] for frame in _main(stacks)[:3])


def _main(stacks: str) -> list[re.Match[str]]:
    """Frames of the main thread, innermost first."""
    threads = [block for block in re.split(r"\n(?=(?:Current t|T)hread )", stacks) if _FRAME.search(block)]
    return list(_FRAME.finditer(threads[-1])) if threads else []
