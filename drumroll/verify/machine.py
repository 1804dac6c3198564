"""What a table of measured numbers is worth nothing without: when, where, and with which versions."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch
import transformers

import drumroll


def facts() -> dict[str, str]:
    """What a reader has to know of this machine, now."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {os.cpu_count()} cores{gpu}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": f"drumroll {drumroll.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    }


def _processor() -> str:
    """The processor's name: Linux knows it, and elsewhere Python does."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
