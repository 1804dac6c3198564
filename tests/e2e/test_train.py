"""Short real runs of the quickstart recipe through the command line: records, agreement, diff, replay, evaluation, exit codes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import psutil
import pytest

from drumroll.observe.run import read_digests, read_run
from tests.e2e import command_line
from tests.e2e.command_line import RECIPE, drumroll, drumroll_here

SMALL = [*command_line.SMALL, "max_steps=3", "record.digests=2"]
pytestmark = pytest.mark.timeout(400)


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


def assert_same_numbers(run_dir: Path, expected: Path, *names: str) -> None:
    for ours, theirs in zip(read_run(run_dir).rl, read_run(expected).rl, strict=True):
        assert ours.tokens_digest == theirs.tokens_digest, (run_dir, ours.step)
        for name in names:
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5), (run_dir, ours.step, name)
        assert theirs.advantage_abs_mean is not None
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6 * theirs.advantage_abs_mean)


def test_every_backend_samples_the_same_tokens_and_reports_the_same_numbers(runs: dict[tuple[str, int], Path]) -> None:
    reference = read_run(runs["single", 1]).rl
    assert [record.step for record in reference] == [1, 2, 3]
    assert all(record.grad_norm > 0 for record in reference)  # rewards differ within groups: there is something to compare
    for run_dir in runs.values():
        assert_same_numbers(run_dir, runs["single", 1], "grad_norm", "entropy", "logprob_mean", "loss_abs")


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
    drumroll_here("replay", f"{runs['fsdp2', 2]}@3", "backend.name=ddp", "runtime.ranks=3", "--json", str(rows_file))
    rows = json.loads(rows_file.read_text())
    assert {row["check"] for row in rows} >= {"loss", "loss_abs", "grad_norm", "entropy", "logprob_mean"}
    assert all(row["passed"] and row["backend"] == "ddp" and row["ranks"] == 3 for row in rows)


def test_replay_fails_when_the_record_says_something_else(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    metrics = runs["ddp", 2] / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    last = json.loads(lines[-1])
    metrics.write_text("\n".join([*lines[:-1], json.dumps({**last, "grad_norm": last["grad_norm"] * 1.001})]) + "\n")
    output = drumroll_here("replay", f"{runs['ddp', 2]}@3", "backend.name=single", "runtime.ranks=1", code=1)
    assert "FAIL" in output


def test_the_trained_model_can_be_evaluated(runs: dict[tuple[str, int], Path]) -> None:
    output = drumroll_here("eval", RECIPE, *SMALL, "--model", str(runs["single", 1] / "model"), "backend.name=single", "runtime.ranks=1")
    assert "eval_score" in output


def test_bad_input_ends_with_2_and_names_the_key() -> None:
    assert "optim.lr" in drumroll("train", RECIPE, "optim.lrr=1", code=2)
    assert "single" in drumroll_here("train", RECIPE, "backend.name=singel", code=2)


def test_a_second_run_keeps_the_first_and_diff_tells_runs_apart(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    """On two ranks of another backend the weights before the first step are the same, bit for bit; after it they are not."""
    run_dir = runs["single", 1]
    before = (run_dir / "metrics.jsonl").read_bytes()
    drumroll_here("train", RECIPE, *SMALL, "backend.name=single", "runtime.ranks=1", f"run_dir={run_dir}")
    first = run_dir.with_name(run_dir.name + ".1")
    assert (first / "metrics.jsonl").read_bytes() == before
    digests = read_digests(first)
    assert [record.step for record in digests] == [0, 2, 3]  # every second step, and the last
    names = set(digests[0].digests)
    assert names == set(digests[-1].digests)
    assert "model.embed_tokens.weight" in names
    assert digests[0].digests != digests[-1].digests
    assert "weights: equal" in drumroll_here("diff", str(first), str(run_dir))
    other = tmp_path / "other"
    shutil.copytree(runs["fsdp2", 2], other)
    text = drumroll_here("diff", str(first), str(other), code=1)
    assert "weights: they differ at step 2, equal up to step 0" in text
    assert "numbers: they differ at rl step 1" in text
    (other / "digests.jsonl").unlink()
    assert "train it with record.digests=1" in drumroll_here("diff", str(first), str(other), code=1)


def test_shared_sequences_give_the_same_tokens_and_numbers(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    """Ranks that share their sequences, where those of the run before had their own."""
    shared = ["backend.name=fsdp2", "runtime.ranks=2", "backend.fsdp2.sequence_ranks=2"]
    drumroll_here("train", RECIPE, *SMALL, *shared, f"run_dir={tmp_path / 'shared'}")
    assert_same_numbers(tmp_path / "shared", runs["fsdp2", 2], "grad_norm", "entropy", "logprob_mean", "loss_abs", "reward_mean")


def test_a_step_is_redone_where_no_rank_alone_may_hold_a_sequence(runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    """Sequences of about twenty tokens, and micro-batches of at most eight a rank: each sequence is alone with its group."""
    file = tmp_path / "rows.json"
    changes = ["backend.fsdp2.sequence_ranks=2", "train.micro_batch_tokens=8"]
    drumroll_here("replay", f"{runs['fsdp2', 2]}@2", *changes, "--json", str(file))
    rows = json.loads(file.read_text())
    assert {row["check"] for row in rows} >= {"loss", "loss_abs", "grad_norm", "entropy", "logprob_mean"}
    assert all(row["passed"] and row["backend"] == "fsdp2" and row["ranks"] == 2 for row in rows)


def test_a_run_that_cannot_start_displaces_nothing(runs: dict[tuple[str, int], Path]) -> None:
    run_dir = runs["fsdp2", 2]
    before = sorted(path.name for path in run_dir.parent.iterdir())
    early, by_a_rank = ["model.path=no/such/model"], ["backend.name=single", "runtime.ranks=2"]
    for run, fault in ((drumroll_here, early), (drumroll, by_a_rank)):
        output = run("train", RECIPE, *SMALL, *fault, f"run_dir={run_dir}", code=2)
        assert output.count("error:") == 1
        assert (run_dir / "summary.json").is_file()
        assert sorted(path.name for path in run_dir.parent.iterdir()) == before


def test_a_rank_killed_in_the_middle_ends_the_run_with_its_records_whole(tmp_path: Path) -> None:
    """Failure case 59, through the command line."""
    run_dir = tmp_path / "killed"
    with command_line.running("train", RECIPE, *SMALL, "max_steps=500", f"run_dir={run_dir}") as driver:
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
        output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert time.monotonic() - start < 30
    assert "was killed by SIGKILL" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] == len(read_run(run_dir).rl) >= 1
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks)
