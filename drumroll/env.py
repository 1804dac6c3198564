"""The environment variables that drumroll reads or sets: one table, used by the code at the top, never as arguments of what it calls."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"  # nothing listens anywhere else unless asked


@dataclass(slots=True, frozen=True)
class Env:
    cache: Path  # DRUMROLL_CACHE: models made in code, converted models, warm-ups; default ~/.cache/drumroll


def read() -> Env:
    """The table as the process's environment has it now."""
    return Env(cache=Path(os.environ.get("DRUMROLL_CACHE", "~/.cache/drumroll")).expanduser())


def use_loopback_for_collectives() -> None:
    """Let gloo and nccl connect ranks of one machine over loopback, whatever the host name resolves to. Before the process group exists.

    nccl finds its peers so; what GPUs of one machine send each other takes another way.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def keep_vllm_in_process() -> None:
    """vLLM inside this process, on the threads this process has, and quiet. Before `import vllm`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # its default binds every rank of a machine to the same cores
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
