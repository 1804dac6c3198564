"""Memory that ran out: how it looks, and what to say of it."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from drumroll.errors import UserError

# Kernel counters of processes killed because memory ran out: of this container where it has one (cgroup v2), else of the machine.
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_MEMINFO = Path("/proc/meminfo")
PROCESS_BYTES = 280 << 20  # of a rank's process on a CPU: Python, torch, transformers, gloo's buffers
# What cuda and cublas say where they, or nccl, take memory past torch's allocator.
_BESIDE_THE_ALLOCATOR = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
_ADVICE = (
    "lower train.micro_batch_tokens, shard over more ranks, or look at what `drumroll plan` says of this recipe (model.checkpointing, "
    "optim.offload, runtime.take_turns)"
)


def check_processes(ranks: int) -> None:
    """Raises UserError where so many processes would take all memory before any of them has a model."""
    if not _MEMINFO.is_file():
        return
    free = int(_MEMINFO.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    if ranks * PROCESS_BYTES > free:
        raise UserError(
            f"runtime.ranks={ranks}: a rank is a process of {PROCESS_BYTES >> 20} MiB before it has a model, and {free >> 20} MiB of this "
            f"machine's memory are free: lower it to {max(1, free // PROCESS_BYTES)} or less"
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
    if isinstance(error, torch.OutOfMemoryError) or any(mark in str(error) for mark in _BESIDE_THE_ALLOCATOR):
        return f"out of device memory: {_ADVICE}\n"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {_ADVICE}\n"
    return ""
