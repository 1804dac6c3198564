"""Short real runs of the quickstart recipe through the command line: records, agreement of backends, replay, evaluation, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drumroll.observe.run import read_run

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")
SMALL = ["warmup.steps=70", "rollout.prompts_per_step=8", "algorithm.group_size=4", "eval.rows=16", "max_steps=3"]
pytestmark = pytest.mark.timeout(400)


def drumroll(*arguments: str, code: int = 0) -> str:
    """Run the command line; returns what it printed."""
    command = [sys.executable, "-c", "from drumroll.cli import main; main()", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """The same recipe on three placements, all from one warm-up."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for backend, ranks in (("single", 1), ("ddp", 2), ("fsdp2", 2)):
        run_dir = folder / f"{backend}-{ranks}"
        drumroll("train", RECIPE, *SMALL, f"backend.name={backend}", f"runtime.ranks={ranks}", f"run_dir={run_dir}")
        found[backend, ranks] = run_dir
    return found


def test_every_backend_samples_the_same_tokens_and_reports_the_same_numbers(runs: dict[tuple[str, int], Path]) -> None:
    reference = read_run(runs["single", 1]).rl
    assert [record.step for record in reference] == [1, 2, 3]
    assert all(record.grad_norm > 0 for record in reference)  # rewards differ within groups: there is something to compare
    for (backend, ranks), run_dir in runs.items():
        for ours, theirs in zip(read_run(run_dir).rl, reference, strict=True):
            assert ours.tokens_digest == theirs.tokens_digest, (backend, ranks, ours.step)
            for name in ("grad_norm", "entropy", "logprob_mean", "loss_abs"):
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5), (backend, ranks, ours.step, name)
            assert theirs.advantage_abs_mean is not None
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-6 * theirs.advantage_abs_mean)


def test_a_run_leaves_complete_records(runs: dict[tuple[str, int], Path]) -> None:
    run_dir = runs["fsdp2", 2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == 3
    assert summary["weight_pushes"] == summary["digests_matched"] == 4  # one before the first step, one after each
    assert summary["logprob_gap_mean"] < 1e-5
    assert len(summary["peak_bytes_per_rank"]) == 2
    assert max(summary["state_bytes_per_rank"]) == pytest.approx(summary["predicted_state_bytes_per_rank"], rel=0.05)
    assert summary["process_bytes"] < summary["predicted_peak_bytes_per_rank"]
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert sum(r["phase"] == "train" for r in rollouts) == 3 * 8 * 4
    assert sum(r["phase"] == "eval" for r in rollouts) == 2 * 16  # before and after
    for rollout in rollouts:
        right = rollout["response"] == "".join(sorted(rollout["columns"]["answer"]))
        assert rollout["reward"] == float(right), rollout
    assert "<svg" in (run_dir / "report.html").read_text()
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "model" / "model.safetensors").is_file()


def test_replay_gives_the_recorded_numbers_on_another_backend_and_rank_count(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    drumroll("replay", f"{runs['fsdp2', 2]}@3", "backend.name=ddp", "runtime.ranks=3", "--json", str(rows_file))
    rows = json.loads(rows_file.read_text())
    assert {row["check"] for row in rows} >= {"loss", "loss_abs", "grad_norm", "entropy", "logprob_mean"}
    assert all(row["passed"] and row["backend"] == "ddp" and row["ranks"] == 3 for row in rows)


def test_replay_fails_when_the_record_says_something_else(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    metrics = runs["ddp", 2] / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])
    metrics.write_text("\n".join([*lines[:-1], json.dumps({**last, "grad_norm": last["grad_norm"] * 1.001})]) + "\n")
    output = drumroll("replay", f"{runs['ddp', 2]}@3", "backend.name=single", "runtime.ranks=1", code=1)
    assert "FAIL" in output


def test_the_trained_model_can_be_evaluated(runs: dict[tuple[str, int], Path]) -> None:
    output = drumroll("eval", RECIPE, *SMALL, "--model", str(runs["single", 1] / "model"), "backend.name=single", "runtime.ranks=1")
    assert "eval_score" in output


def test_bad_input_ends_with_2_and_names_the_key() -> None:
    assert "optim.lr" in drumroll("train", RECIPE, "optim.lrr=1", code=2)
    assert "single" in drumroll("train", RECIPE, "backend.name=singel", code=2)


def test_a_second_run_keeps_the_first(runs: dict[tuple[str, int], Path]) -> None:
    run_dir = runs["single", 1]
    before = (run_dir / "metrics.jsonl").read_bytes()
    drumroll("train", RECIPE, *SMALL, "max_steps=1", "backend.name=single", "runtime.ranks=1", f"run_dir={run_dir}")
    assert (run_dir.with_name(run_dir.name + ".1") / "metrics.jsonl").read_bytes() == before


def test_a_run_that_cannot_start_displaces_nothing(runs: dict[tuple[str, int], Path]) -> None:
    run_dir = runs["fsdp2", 2]
    before = sorted(path.name for path in run_dir.parent.iterdir())
    for fault in (["model.path=no/such/model"], ["backend.name=single", "runtime.ranks=2"]):  # found early, and by a rank
        output = drumroll("train", RECIPE, *SMALL, *fault, f"run_dir={run_dir}", code=2)
        assert output.count("error:") == 1
        assert (run_dir / "summary.json").is_file()
        assert sorted(path.name for path in run_dir.parent.iterdir()) == before


def test_a_rank_killed_in_the_middle_ends_the_run_with_its_records_whole(tmp_path: Path) -> None:
    """Failure case 59, through the command line."""
    run_dir = tmp_path / "killed"
    arguments = ["train", RECIPE, *SMALL, "max_steps=500", f"run_dir={run_dir}"]
    driver = subprocess.Popen(
        [sys.executable, "-c", "from drumroll.cli import main; main()", *arguments],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (run_dir / "metrics.jsonl").is_file() or '"rl"' not in (run_dir / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.2)
    servers = [c for c in psutil.Process(driver.pid).children() if "forkserver" in " ".join(c.cmdline())]
    ranks = [rank for server in servers for rank in server.children()]
    killed = max(ranks, key=lambda process: process.memory_info().rss)
    killed.kill()
    start = time.monotonic()
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert time.monotonic() - start < 30
    assert "was killed by SIGKILL" in errors
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] == len(read_run(run_dir).rl) >= 1
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks)
