"""The quickstart with ranks that share their sequences: the same tokens and numbers as without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumroll.observe.run import read_run

ROOT = Path(__file__).parents[2]
SMALL = ["warmup.steps=70", "rollout.prompts_per_step=8", "algorithm.group_size=4", "eval.rows=16", "max_steps=2"]
pytestmark = pytest.mark.timeout(400)


def drumroll(*arguments: str) -> None:
    """Run the command line."""
    command = [sys.executable, "-c", "from drumroll.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every rank has its own sequences."""
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    drumroll("train", "recipes/quickstart.yaml", *SMALL, f"run_dir={run_dir}")
    return run_dir


def test_shared_sequences_give_the_same_tokens_and_numbers(alone: Path, tmp_path: Path) -> None:
    drumroll("train", "recipes/quickstart.yaml", *SMALL, f"run_dir={tmp_path / 'shared'}", "backend.fsdp2.sequence_ranks=2")
    expected = read_run(alone).rl
    assert [record.step for record in expected] == [1, 2]
    assert all(record.grad_norm > 0 for record in expected)  # rewards differ within groups: there is something to compare
    for ours, theirs in zip(read_run(tmp_path / "shared").rl, expected, strict=True):
        assert ours.tokens_digest == theirs.tokens_digest
        for number in ("grad_norm", "entropy", "logprob_mean", "loss_abs", "reward_mean"):
            assert getattr(ours, number) == pytest.approx(getattr(theirs, number), rel=1e-5), (ours.step, number)
        assert theirs.advantage_abs_mean is not None
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6 * theirs.advantage_abs_mean)


def test_a_step_is_redone_where_no_rank_alone_may_hold_a_sequence(alone: Path, tmp_path: Path) -> None:
    """Sequences of about twenty tokens, and micro-batches of at most eight a rank: each sequence is alone with its group."""
    file = tmp_path / "rows.json"
    drumroll("replay", f"{alone}@2", "backend.fsdp2.sequence_ranks=2", "train.micro_batch_tokens=8", "--json", str(file))
    rows = json.loads(file.read_text())
    assert {row["check"] for row in rows} >= {"loss", "loss_abs", "grad_norm", "entropy", "logprob_mean"}
    assert all(row["passed"] and row["backend"] == "fsdp2" and row["ranks"] == 2 for row in rows)
