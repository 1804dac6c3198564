"""What goes wrong ends the run in seconds with its first cause and rank, leaves nothing running, and what was saved is whole.

Failure cases 58 and 59. A small RL run on two ranks, in which rank 1 fails while it samples for step 3.
"""

from __future__ import annotations

import random
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from drumroll import config as configs
from drumroll.config import RunConfig
from drumroll.errors import RunError, UserError
from drumroll.observe.run import read_events, read_rollouts, read_run, read_steps
from drumroll.pipelines import resume, rl, sft
from drumroll.runtime.failure import RankFailure
from tests.e2e.command_line import assert_group_is_gone, running

FAULTY = f"{Path(__file__).parent / 'faulty_engine.py'}"
ENGINE = f"{FAULTY}:FaultyEngine"
STEPS = 6
pytestmark = pytest.mark.timeout(240)

SFT: dict[str, Any] = {
    "pipeline": "sft",
    "max_steps": STEPS,
    "model": {"path": "builtin:llama-0.8m"},
    "data": {"train": {"task": "sort", "options": {"digits": 3}, "rows": 10}, "max_prompt_tokens": 24},
    "rollout": {"max_tokens": 6},
    "train": {"batch_size": 4},
    "optim": {"lr": 1e-3},
    "backend": {"name": "ddp"},
    "runtime": {"ranks": 2, "device": "cpu"},
    "checkpoint": {"every": 2, "keep": STEPS},
}
RL = {key: value for key, value in SFT.items() if key not in ("pipeline", "train")} | {
    "rollout": {"prompts_per_step": 4, "max_tokens": 6},
    "rewards": [{"fn": f"{FAULTY}:digits", "isolate": False}],
    "engine": {"name": "transformers"},
    "algorithm": {"name": "grpo", "group_size": 2},
}


def run_config(tree: dict[str, Any], run_dir: Path, **changes: Any) -> RunConfig:
    return configs.parse(tree | {"run_dir": str(run_dir)} | changes)


def faulty(how: str, once: Path | None = None) -> dict[str, Any]:
    return {"name": ENGINE, ENGINE: {"how": how, "once": str(once or "")}}


def ranks() -> list[psutil.Process]:
    """Ranks that live: below the server that they are forked from."""
    return [rank for server in psutil.Process().children() if "forkserver" in " ".join(server.cmdline()) for rank in server.children()]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert ranks() == []


def numbers(run_dir: Path) -> list[Any]:
    """All records but time and memory, and every rollout."""
    idle = {"time": 0.0, "tokens_per_second": 0.0, "peak_bytes": 0, "seconds_total": 0.0}
    phases = {f"seconds_{phase}": 0.0 for phase in ("generate", "reward", "logprobs", "train", "sync")}
    steps = [replace(record, **idle, **phases) for record in read_run(run_dir).steps]  # type: ignore[arg-type]
    return [steps, list(read_rollouts(run_dir)), (run_dir / "model" / "model.safetensors").read_bytes()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], float]:
    """Numbers of the RL run that nothing happened to, and its seconds."""
    run_dir, started = tmp_path_factory.mktemp("straight") / "run", time.monotonic()
    rl.train(run_config(RL, run_dir))
    return numbers(run_dir), time.monotonic() - started


def dumped(config: RunConfig, recipe: Path) -> str:
    configs.dump(config, recipe)
    return str(recipe)


# --- a rank


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"rank 1 failed first:\n(.|\n)*ValueError: bad row 17"),
        ("exit", r"rank 1 failed first:\nthe process of rank 1 exited with code 7"),
        ("kill", r"rank 1 failed first:\nthe process of rank 1 was killed by SIGKILL"),
        ("memory", r"rank 1 failed first:\nout of memory: lower train\.micro_batch_tokens"),
        ("lose", r"rank 1: its engine returned 3 completions for 4 samples; first lost \(group, sample\): \[\(\d+, 1\)\]"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_own_words(how: str, words: str, tmp_path: Path) -> None:
    """Case 59. The checkpoint of step 2 is there, the records are whole, the summary says why."""
    with pytest.raises(RunError, match=words) as caught:
        rl.train(run_config(RL, tmp_path / "run", engine=faulty(how)))
    assert [record.step for record in read_steps(tmp_path / "run")] == [1, 2]
    summary = read_run(tmp_path / "run").summary
    assert summary is not None and summary.status == "failed" and str(caught.value) in str(summary.error)


def test_a_rank_that_hangs_ends_the_run_at_the_deadline_with_all_stacks(tmp_path: Path) -> None:
    """On the command line: exit code, message, `stacks.txt`, and nothing left of the process group."""
    config = run_config(RL, tmp_path / "run", engine=faulty("hang"), runtime=RL["runtime"] | {"timeout_s": 30})
    with running("train", dumped(config, tmp_path / "recipe.yaml")) as process:
        output, _ = process.communicate(timeout=200)
        assert_group_is_gone(process)
    assert process.returncode == 1, output
    assert re.search(r"failed: rank 1 failed first:\nsilent for 30 s .*Worker\.generate: no answer from ranks \[1\]", output), output
    assert re.search(r"rank 1: _fail \(faulty_engine\.py:\d+\) < generate", output), output
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert all(f"== {who}\n" in stacks for who in ("rank 0", "rank 1", "driver")) and "faulty_engine.py" in stacks


# --- restarts


def test_a_rank_killed_at_a_random_moment_and_the_run_is_as_if_nothing_had_been(
    straight: tuple[list[Any], float], tmp_path: Path
) -> None:
    expected, seconds = straight
    run_dir, moment, victim = tmp_path / "run", random.uniform(0.0, 0.8), random.randrange(2)
    killed: list[int] = []

    def kill() -> None:
        while not (run_dir / "metrics.jsonl").is_file() or not ranks():
            time.sleep(0.05)
        time.sleep(moment * seconds)
        if len(living := ranks()) == 2:
            living[victim].kill()
            killed.append(living[victim].pid)

    thread = threading.Thread(target=kill)
    thread.start()
    rl.train(run_config(RL, run_dir, runtime=RL["runtime"] | {"max_restarts": 1}))
    thread.join()
    assert numbers(run_dir) == expected, f"moment {moment}, victim {victim}"
    events = read_events(run_dir)
    assert [event.kind for event in events] == ["restart"] * len(killed), f"moment {moment}"
    why = r"restart 1 of at most 1 .*: rank \d failed first:\nthe process of rank \d was killed by SIGKILL"
    assert all(re.search(why, event.text) for event in events)


@pytest.mark.parametrize("how", ["hang", "raise"])
def test_restarts_are_counted_noted_and_give_the_same_numbers(
    how: str, straight: tuple[list[Any], float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 fails once in step 3; the checkpoint of step 2 may be there or still being written."""
    runtime = RL["runtime"] | {"max_restarts": 2, "timeout_s": 15}
    rl.train(run_config(RL, tmp_path / "run", engine=faulty(how, tmp_path / "once"), runtime=runtime))
    assert numbers(tmp_path / "run") == straight[0]
    [event] = read_events(tmp_path / "run")
    assert event.kind == "restart" and event.step in (0, 2) and "restart 1 of at most 2" in event.text
    assert "restart 1 of at most 2" in capsys.readouterr().out


def test_what_fails_again_and_again_ends_the_run_and_what_is_the_users_at_once(tmp_path: Path) -> None:
    runtime = RL["runtime"] | {"max_restarts": 1}
    with pytest.raises(RankFailure, match="bad row 17"):
        rl.train(run_config(RL, tmp_path / "raise", engine=faulty("raise"), runtime=runtime))
    assert [event.kind for event in read_events(tmp_path / "raise")] == ["restart"]
    with pytest.raises(UserError, match="this model has no such thing"):
        rl.train(run_config(RL, tmp_path / "user", engine=faulty("user"), runtime=runtime))
    assert read_events(tmp_path / "user") == []


def test_restarts_without_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every: 0 does not read runtime\.max_restarts: .*set checkpoint\.every"):
        run_config(RL, tmp_path, checkpoint={}, runtime={"max_restarts": 1})


# --- a disk


def small_files() -> None:
    """No file beyond 5 MiB, which is less than the state of a checkpoint (9.6 MB, on one rank) and more than the model (3.2 MB)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))


@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_leaves_what_was_saved_and_ends_the_run_or_not(on_error: str, async_save: bool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    alone = {"backend": {"name": "single"}, "runtime": {"ranks": 1, "device": "cpu"}}
    sft.train(run_config(SFT, run_dir, max_steps=2, **alone))
    before = {file: file.read_bytes() for file in (run_dir / "checkpoints").rglob("*") if file.is_file()}
    checkpoint = SFT["checkpoint"] | {"on_error": on_error, "async_save": async_save}
    config = run_config(SFT, run_dir, checkpoint=checkpoint, **alone)
    with running("train", dumped(config, tmp_path / "recipe.yaml"), "--resume", prepare=small_files) as process:
        output, _ = process.communicate(timeout=100)
        assert_group_is_gone(process)
    assert {file: file.read_bytes() for file in (run_dir / "checkpoints").rglob("*") if file.is_file()} == before, "and nothing else"
    assert re.search(r"cannot write its part of the checkpoint: .*\(\d+\.\d\d GiB free there\); free the disk", output), output
    if on_error == "stop":
        assert process.returncode == 1, output
    else:
        assert process.returncode == 0, output
        assert [event.kind for event in read_events(run_dir)] == ["checkpoint", "checkpoint"]
        assert "the checkpoint of step 4 could not be written, and --resume would go on after step 2" in output
        if not async_save:  # in the background it may be heard of after the last step only
            assert [record.alarms for record in read_steps(run_dir)][-2:] == [["checkpoint"]] * 2
        assert (run_dir / "model" / "model.safetensors").is_file()
    found = resume.find(config, None)
    assert found is not None and found.state.step == 2


# --- a tracker


def test_a_dead_tracker_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events: list[Any] = []

    def add_event(self: EventFileWriter, event: Any) -> None:
        events.append(event)
        if len(events) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventFileWriter, "add_event", add_event)
    sft.train(run_config(SFT, tmp_path / "run"))
    records = read_steps(tmp_path / "run")
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert [record.alarms for record in records] == [[], [], [], *([["tracker"]] * 3)]
    [event] = read_events(tmp_path / "run")
    assert event.kind == "tracker" and "No space left on device" in event.text
    assert len(events) == 4


def test_signals_have_not_been_left_behind() -> None:
    """Runs in this process have put back what they replaced."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
