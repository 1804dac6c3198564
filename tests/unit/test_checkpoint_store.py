"""Checkpoint directories: killed at any stage of a save, rotated, put aside. Failure cases 43 and 44."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from drumroll import config as configs
from drumroll import plugins
from drumroll.checkpoint import retention, rng
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.identity import Fingerprint
from drumroll.checkpoint.manifest import Damaged
from drumroll.checkpoint.store import CannotWrite, Checkpoint, CheckpointStore
from drumroll.config import CheckpointConfig, RunConfig
from drumroll.data.stream import Cursor
from drumroll.errors import RunError, UserError
from drumroll.pipelines.room import check_room, checkpoint_bytes
from drumroll.runtime.worker import _commit

MODEL = Fingerprint({"hidden_size": 4}, {"w": [4, 4], "b": [4]})
STAGES = ("drafted", "written", "described", "renamed", "rotated")


def run(**checkpoint: Any) -> RunConfig:
    return configs.parse(
        {
            "pipeline": "sft",
            "max_steps": 100,
            "run_dir": "r",
            "model": {"path": "m"},
            "data": {"train": {"task": "sort"}},
            "backend": {"name": plugins.SPECIFICATION_BACKEND},
            "checkpoint": {"every": 1, **checkpoint},
        }
    )


def state(step: int, **metrics: float) -> DriverState:
    return DriverState(step=step, applied_steps=step, skips_in_a_row=0, version=-1, cursor=Cursor(), metrics=metrics)


def save(store: CheckpointStore, step: int, **metrics: float) -> Path:
    """As a run does it, with a file in place of the ranks' parts."""
    draft = store.draft(state(step, **metrics), run(), MODEL, rng.capture(), [])
    (draft.tensors / "shard-00001.safetensors").write_bytes(bytes(range(256)) * 40)
    return store.commit(draft)


def steps(store: CheckpointStore) -> list[int]:
    """Of what is valid: every directory must be."""
    return [store.open(path).state().step for path in store.paths()]


def killed_at(stage: str, store: CheckpointStore, step: int) -> None:
    """Save in a child process that is killed when it reaches the stage."""
    child = os.fork()
    if child == 0:
        try:
            kill = lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == stage else None  # noqa: E731
            save(CheckpointStore(store.folder, store.retention, kill), step)
        finally:
            os._exit(1)  # not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_killed_at_any_stage_leaves_a_valid_checkpoint_and_no_orphan(stage: str, tmp_path: Path) -> None:
    """Case 43. With the fewest that may be kept: the new one is valid before the old one goes."""
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=1))
    save(store, 1)
    killed_at(stage, store, 2)
    newest = 2 if STAGES.index(stage) >= STAGES.index("renamed") else 1
    assert steps(store)[-1] == newest
    assert store.go_on_from(newest) == []
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:08d}" for step in steps(store)]
    save(store, 2) if newest == 1 else save(store, 3)
    assert steps(store) == [newest + 1]


def test_steps_are_numbers(tmp_path: Path) -> None:
    """Case 44: as text, 10000 comes before 9900."""
    store = CheckpointStore(tmp_path, CheckpointConfig(every=100, keep=2))
    for step in (9_800, 9_900, 10_000, 100_000_000):
        save(store, step)
    assert steps(store) == [10_000, 100_000_000]


def test_what_a_resumed_run_does_again_is_put_aside_and_goes_with_its_next_save(tmp_path: Path) -> None:
    """Case 44: resumed from 1 with a stale 5000 there; the stale one is neither newest nor counted."""
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=1))
    for step in (1, 5000):
        save(CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=9)), step)
    assert [path.name for path in store.go_on_from(1)] == ["abandoned-step-00005000"]
    assert steps(store) == [1]
    save(store, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_planted_later_one_does_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=1))
    save(CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=9)), 5000)
    save(store, 2)
    save(store, 3)
    assert steps(store) == [3, 5000]


def test_a_damaged_one_of_the_same_step_gives_way(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=2))
    save(store, 1)
    (save(store, 2) / "driver.json").write_text("{}")
    with pytest.raises(Damaged, match=r"driver\.json: expected \d+ bytes, found 2"):
        store.open(tmp_path / "step-00000002")
    save(store, 2)
    assert steps(store) == [1, 2]


def test_a_file_of_another_checkpoint_among_its_own_is_refused(tmp_path: Path) -> None:
    """A reader of shards takes all there are. What a network disk leaves behind (hidden) is not meant."""
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1))
    path = save(store, 1)
    (path / "state" / ".nfs000000000001").touch()
    store.open(path)
    shutil.copy(path / "state" / "shard-00001.safetensors", path / "state" / "shard-00002.safetensors")
    with pytest.raises(Damaged, match=r"state/shard-00002\.safetensors: not a file of this checkpoint"):
        store.open(path)


def test_only_names_of_steps_are_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=1))
    for name in ("step-abc", "step-", "step-20", "step-\u00b2", "step-00000001.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").touch()
    save(store, 2)
    save(store, 3)
    assert steps(store) == [3]
    assert len(list(tmp_path.iterdir())) == 7


def test_what_cannot_be_removed_costs_nothing_but_space(tmp_path: Path) -> None:
    """Somebody has removed the old one already, while the new one was written; a link goes, and what it points at stays."""
    store = CheckpointStore(tmp_path / "c", CheckpointConfig(every=1, keep=1))
    first = save(store, 1)
    gone = CheckpointStore(store.folder, store.retention, lambda stage: shutil.rmtree(first) if stage == "renamed" else None)
    second = save(gone, 2)
    assert steps(store) == [2]
    second.rename(tmp_path / "elsewhere")
    second.symlink_to(tmp_path / "elsewhere")
    save(store, 3)
    assert [path.name for path in store.folder.iterdir()] == ["step-00000003"]
    assert store.left_over() == []
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 2}, {5, 6}),
        ({"keep": 1, "keep_every": 3}, {3, 6}),
        ({"keep": 1, "keep_best": "eval/score"}, {4, 6}),  # 2 and 4 are equally good: the later one
        ({"keep": 1, "keep_best": "eval/score", "keep_best_is": "min"}, {1, 6}),
        ({"keep": 1, "keep_best": "sft/loss"}, {6}),  # in none of them
        ({"keep": 1, "keep_best": "rl/reward_mean"}, {3, 6}),  # NaN is no score, wherever it stands
        ({"keep": 1, "keep_best": "rl/reward_mean", "keep_best_is": "min"}, {4, 6}),
    ],
)
def test_what_is_kept(options: dict[str, Any], expected: set[int]) -> None:
    scores: dict[int, dict[str, float]] = {step: {} for step in range(1, 7)}
    scores |= {1: {"eval/score": 0.1}, 2: {"eval/score": 0.9}, 4: {"eval/score": 0.9}, 5: {"eval/score": 0.5}}
    for step, reward in ((1, math.nan), (2, 0.2), (3, 0.3), (4, 0.1), (5, math.nan)):
        scores[step] = scores[step] | {"rl/reward_mean": reward}
    assert retention.kept(scores, CheckpointConfig(every=1, **options)) == expected


def test_the_best_stays_through_many_saves(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1, keep=1, keep_best="eval/score"))
    for step, score in enumerate((0.1, 0.7, 0.3, 0.2), start=1):
        save(store, step, **{"eval/score": score})
    assert steps(store) == [2, 4]


@pytest.mark.parametrize(("metric", "good"), [("sft/loss", True), ("sft/losss", False), ("eval/score", False), ("sft/phase", False)])
def test_the_metric_of_keep_best_must_be_recorded(metric: str, good: bool) -> None:
    config = run(keep_best=metric)
    if good:
        retention.check_metric(config)
    else:
        with pytest.raises(UserError, match=f"checkpoint.keep_best: this run records no metric '{metric}'"):
            retention.check_metric(config)


def test_a_disk_that_refuses_is_named_with_its_space(tmp_path: Path) -> None:
    store = CheckpointStore(Path("/proc/no-such"), CheckpointConfig(every=1))
    with pytest.raises(RunError, match=r"/proc/no-such/staging-00000001: cannot write the checkpoint: .*free the disk"):
        save(store, 1)


def test_checkpoints_that_would_not_fit_are_refused_before_the_first_step(tmp_path: Path) -> None:
    """20 elements of 12 bytes: parameter and two moments. Of a model with a million times a million there is no room for three."""
    assert checkpoint_bytes(run(), MODEL) == 240
    assert checkpoint_bytes(run().model_copy(update={"model": configs.ModelConfig(path="m", trainable=("^b$",))}), MODEL) == 80 + 32
    adapters = run().model_copy(update={"model": configs.ModelConfig(path="m", lora=configs.LoraConfig(rank=2))})
    assert checkpoint_bytes(adapters, MODEL) == 12 * 2 * (4 + 4)  # of `w`; the model itself is not in it
    store = CheckpointStore(tmp_path / "checkpoints", run().checkpoint)
    check_room(run(), MODEL, store)
    with pytest.raises(UserError, match=r"checkpoint: 3 checkpoints of 11175\.87 GiB each .* are free: lower checkpoint\.keep"):
        check_room(run(), Fingerprint({}, {"w": [1_000_000, 1_000_000]}), store)


@pytest.mark.parametrize(
    ("options", "held"),
    [({"every": 1}, 3), ({"every": 60}, 2), ({"every": 10, "keep_every": 20}, 8), ({"every": 9, "keep_best": "sft/loss"}, 4)],
)
def test_how_many_lie_on_the_disk_at_once(options: dict[str, Any], held: int) -> None:
    assert retention.most_held(run(**options)) == held


def test_the_driver_state_comes_back_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(every=1))
    cursor = Cursor(epoch=1, position=2, draws=12, left_out=3, truncated=4)
    saved = DriverState(step=3, applied_steps=2, skips_in_a_row=1, version=3, cursor=cursor, records={"a": 7}, metrics={"b": 0.1})
    draft = store.draft(saved, run(), MODEL, rng.capture(), [])
    assert Checkpoint(draft.path).state() == saved
    assert Checkpoint(draft.path).config() == run()
    file = draft.path / "driver.json"
    file.write_text(file.read_text().replace("left_out", "skipped"))
    with pytest.raises(RunError, match=r"cursor: names saved and restored differ: missing left_out; only saved skipped"):
        Checkpoint(draft.path).state()


def test_a_save_has_failed_only_when_nobody_writes_any_more() -> None:
    """The policy's part fails at once while the critic's is still being written: what there is of both will be removed."""
    failed: Future[None] = Future()
    failed.set_exception(CannotWrite("full"))
    writing: Future[None] = Future()
    threading.Timer(0.2, writing.set_result, (None,)).start()
    with pytest.raises(CannotWrite, match="full"):
        _commit([failed, writing], None)
    assert writing.done()
