"""The benchmarks say in one clear word what they lack."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run(command: list[str], repository: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_check_without_a_gpu(repository: Path) -> None:
    ran = run(["sh", "benchmarks/gpu_check.sh"], repository)
    assert (ran.returncode, ran.stdout.count("NO GPU")) == (3, 1), ran.stdout + ran.stderr


def test_gpu_check_with_a_folder_that_holds_no_wheel(repository: Path, tmp_path: Path) -> None:
    ran = run(["sh", "benchmarks/gpu_check.sh", str(tmp_path)], repository)
    assert ran.returncode != 0 and "whl" in ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_grpo_step_without_trl_says_how_to_install_it(repository: Path) -> None:
    ran = run([sys.executable, "benchmarks/grpo_step.py"], repository)
    assert ran.returncode == 2
    assert "pip install -e '.[bench]'" in ran.stderr
