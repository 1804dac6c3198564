"""Memory that ran out: how it looks, and what to say of it."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

# Kernel counters of processes killed because memory ran out: of this container where it has one (cgroup v2), else of the machine.
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_ADVICE = (
    "lower train.micro_batch_tokens, shard over more ranks, or look at what `drumroll plan` says of this recipe (model.checkpointing, "
    "optim.offload, runtime.take_turns)"
)


def ran_out() -> int | None:
    """How many processes the kernel has killed for want of memory; None where it does not say."""
    for file in _COUNTERS:
        if file.is_file():
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return None


def words_of_kill(number: int, before: int | None, after: int | None) -> str:
    """What happened to a process that signal `number` ended; `before` and `after`: `ran_out` when it started, and now."""
    how = f"was killed by {signal.Signals(number).name}"
    if number != signal.SIGKILL:
        return how
    if before is None or after is None:
        return f"{how}; the kernel kills the largest process when memory runs out"
    if after > before:
        return f"{how}: memory ran out, and the kernel chose it (it counted {after - before} such kills since the start); {_ADVICE}"
    return f"{how}; not for want of memory, the kernel has counted no such kill since the start"


def words_of_error(error: BaseException) -> str:
    """A line about an exception that says that memory ran out, on a device or on the host; else nothing."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of device memory: {_ADVICE}\n"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {_ADVICE}\n"
    return ""
