"""Resume: bit-equal on the same ranks, nothing but rounding elsewhere; damaged checkpoints refused; nothing lost when all is killed.

Failure cases 37, 39, 41, 42 and 43. A straight run saves after every step, in the background; copies of its directory go on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drumroll import config as configs
from drumroll import plugins
from drumroll.backends.state import read as read_checkpoint
from drumroll.checkpoint import manifest, rng
from drumroll.checkpoint.store import Checkpoint, CheckpointStore
from drumroll.config import RunConfig
from drumroll.errors import UserError
from drumroll.observe.run import read_rollouts, read_run, read_steps
from drumroll.pipelines import resume, rl, sft
from drumroll.pipelines.run_dir import claim
from drumroll.runtime.local import launch
from drumroll.runtime.plan import Plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from tests.e2e.command_line import running

STEPS = 6  # of 4 draws over 10 rows: step 2 ends in the middle of the first epoch, step 5 at the end of the second
SPREAD = [name for name in plugins.names("backends") if name != plugins.SPECIFICATION_BACKEND]
pytestmark = pytest.mark.timeout(300)

RL: dict[str, Any] = {
    "max_steps": STEPS,
    "model": {"path": "builtin:llama-0.8m"},
    "data": {"train": {"task": "sort", "options": {"digits": 3}, "rows": 10}, "max_prompt_tokens": 24},
    "rollout": {"prompts_per_step": 4, "max_tokens": 6},
    "algorithm": {"name": "grpo", "group_size": 4, "kl": {"coef": 0.01}, "minibatches": 2, "epochs": 2},
    "optim": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
    "checkpoint": {"every": 1, "keep": STEPS},
}
SFT = {key: RL[key] for key in ("max_steps", "model", "data", "optim", "checkpoint")} | {
    "pipeline": "sft",
    "rollout": {"max_tokens": 6},
    "train": {"batch_size": 4},
}
KINDS = {
    "rl": RL | {"data": RL["data"] | {"eval": {"task": "sort", "options": {"digits": 3}, "rows": 4, "seed": 1}}, "eval": {"every": 3}},
    "dynamic": RL | {"algorithm": {"name": "dapo", "group_size": 2, "max_draws": 3}},
    "sft": SFT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a reward that a model with random weights gets some of, and of which some is by chance; and an engine that draws on its rank,
    from generators that nothing else there draws from: case 41."""
    made = tmp_path_factory.mktemp("resume")
    slow = f"Path({str(made / 'slow')!r})"  # while there is such a file, a step takes long enough to be met in the middle
    (made / "reward.py").write_text(
        "import random, time\nfrom pathlib import Path\n\nimport numpy as np\nimport torch\n\n"
        "def digits(rollout, prompt):\n"
        f"    time.sleep(0.03 if {slow}.exists() else 0)\n"
        "    chance = (random.random() + np.random.rand() + float(torch.rand(()))) / 30\n"
        "    return sum(c.isdigit() for c in rollout.text) / 6 + chance\n"
    )
    (made / "engine.py").write_text(
        "import random\n\nimport numpy as np\nimport torch\n\nfrom drumroll.engines.transformers import PLUGIN as Sound\n\n"
        "class Drawing(Sound):\n"
        "    def generate(self, requests):\n"
        "        random.random(), np.random.standard_normal(), torch.rand(())\n"
        "        return super().generate(requests)\n"
    )
    return made


def run_config(folder: Path, run_dir: Path, place: str, tree: dict[str, Any] = RL, **changes: Any) -> RunConfig:
    backend, _, ranks = place.rpartition("-")
    placed = {"run_dir": str(run_dir), "backend": {"name": backend}, "runtime": {"ranks": int(ranks), "device": "cpu"}}
    if tree.get("pipeline") != "sft":
        placed["rewards"] = [{"fn": f"{folder}/reward.py:digits", "isolate": False}]
        placed["engine"] = {"name": f"{folder}/engine.py:Drawing"}
    return configs.parse(tree | placed | changes)


def train(config: RunConfig, resumed: resume.Resumed | None = None) -> Path:
    (sft.train if config.pipeline == "sft" else rl.train)(config, resumed)
    return Path(config.run_dir)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Callable[[str, str], Path]:
    """(kind, place) -> the directory of its run that never stopped."""
    done: dict[tuple[str, str], Path] = {}

    def run(kind: str, place: str) -> Path:
        if (kind, place) not in done:
            done[kind, place] = train(run_config(folder, folder / f"{kind}-{place}", place, KINDS[kind]))
        return done[kind, place]

    return run


def copy(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    return to


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def go_on(config: RunConfig, step: int | None = None) -> resume.Resumed:
    """Resume and train to the end."""
    found = resume.find(config, None if step is None else checkpoint_of(Path(config.run_dir), step))
    assert found is not None
    train(config, found)
    return found


def numbers(run_dir: Path) -> list[Any]:
    """All records but time and memory, and every rollout."""
    idle = {"time": 0.0, "tokens_per_second": 0.0, "peak_bytes": 0, "seconds_total": 0.0}
    phases = {f"seconds_{phase}": 0.0 for phase in ("generate", "reward", "logprobs", "train", "sync")}
    run = read_run(run_dir)
    steps = [replace(record, **idle, **phases) for record in run.steps]  # type: ignore[arg-type]
    return [steps, [replace(record, time=0.0, seconds=0.0) for record in run.evals], list(read_rollouts(run_dir))]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Every record, the final model, and the last checkpoint's parameters, moments, step count and generators, bit for bit."""
    for mine, other in zip(numbers(ours), numbers(theirs), strict=True):
        assert mine == other
    assert len((ours / "metrics.jsonl").read_text().splitlines()) == len(read_steps(theirs)), "a step stands twice in the file"
    models = [load_file(path / "model" / "model.safetensors") for path in (ours, theirs)]
    states = [read_checkpoint(checkpoint_of(path, STEPS) / "state") for path in (ours, theirs)]
    for mine, other in (models, states):
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    drivers = [Checkpoint(checkpoint_of(path, STEPS)).state() for path in (ours, theirs)]
    assert drivers[0].cursor == drivers[1].cursor
    assert drivers[0].applied_steps == drivers[1].applied_steps
    generators = [{file.name: rng.read(file) for file in (checkpoint_of(path, STEPS) / "rng").iterdir()} for path in (ours, theirs)]
    assert generators[0].keys() == generators[1].keys()
    for name, states in generators[0].items():
        assert all(np.array_equal(values, generators[1][name][kind]) for kind, values in states.items()), f"generators of {name}"


# --- exact


@pytest.mark.parametrize(
    ("kind", "place", "stops"),
    [
        ("rl", "single-1", (2, 4)),  # stopped twice in one epoch
        *(("rl", f"{name}-2", (5,) if index % 2 else (2,)) for index, name in enumerate(SPREAD)),  # at a border of epochs, or within one
        ("dynamic", "single-1", (3,)),
        ("sft", "single-1", (2, 5)),
    ],
)
def test_what_is_resumed_is_bit_equal_to_what_never_stopped(
    kind: str, place: str, stops: tuple[int, ...], straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    """Cases 39 (learning rates), 41 and 42: losses, learning rates, tokens of every rollout, moments, the model left behind."""
    whole = straight(kind, place)
    run_dir = copy(whole, tmp_path / "run")
    for stop in stops:
        found = go_on(run_config(folder, run_dir, place, KINDS[kind]), stop)
        assert found.exact
        assert "contract: exact" in found.words()
    assert_same_run(run_dir, whole)
    assert len({record.lr for record in read_steps(whole)}) >= 4, "a constant rate would prove nothing"
    assert all(record.grad_norm > 0 for record in read_steps(whole))


def test_a_save_that_training_waits_for_gives_the_same_numbers(straight: Callable[[str, str], Path], folder: Path, tmp_path: Path) -> None:
    whole = straight("sft", "single-1")
    checkpoint = SFT["checkpoint"] | {"async_save": False}
    run_dir = train(run_config(folder, tmp_path / "run", "single-1", SFT, checkpoint=checkpoint))
    assert_same_run(run_dir, whole)


# --- elastic


def states_after_loading(config: RunConfig, saved: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """What the ranks of `config` hold once they have loaded, as saved again by them."""
    found = resume.find(config, saved)
    assert found is not None and not found.exact
    spec = WorkerSpec(config, found.folder, Plan(config.runtime.ranks, frozenset({"policy"})))
    with launch(partial(Worker, spec=spec), config.runtime.ranks, "cpu", 60.0) as ranks:
        policy = Policy(ranks, config, total_steps=1)
        policy.restore(found.checkpoint, found.state, generators=False)
        store = CheckpointStore(scratch, config.checkpoint)
        draft = store.draft(found.state, config, resume.fingerprint(found.folder), {}, [])
        policy.save(store, draft, background=False)
    return read_checkpoint(scratch / saved.name / "state")


@pytest.mark.parametrize(
    "route", [("fsdp2-2", "fsdp2-1"), ("fsdp2-2", "fsdp2-4"), ("ddp-2", "fsdp2-2", "single-1")], ids=lambda route: " ".join(route)
)
def test_elsewhere_state_is_bit_equal_and_prompts_and_seeds_are_the_same(
    route: tuple[str, ...], straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    """Case 37, along the route: two steps at each place."""
    whole = straight("rl", route[0])
    run_dir, stop = copy(whole, tmp_path / "run"), 2
    for place in route[1:]:
        config = run_config(folder, run_dir, place, KINDS["rl"], max_steps=stop + 2)
        saved = checkpoint_of(run_dir, stop)
        loaded = states_after_loading(config, saved, tmp_path / f"again-{place}")
        expected = read_checkpoint(saved / "state")
        assert loaded.keys() == expected.keys()
        assert [name for name in loaded if not torch.equal(loaded[name], expected[name])] == []
        found = go_on(config, stop)
        assert "contract: elastic" in found.words()
        assert any(key in found.words() for key in ("runtime.ranks 2 -> ", 'backend.name "ddp" -> "fsdp2"'))
        stop += 2
    rollouts = [[r for r in read_rollouts(of) if r.step <= stop and r.phase == "train"] for of in (run_dir, whole)]
    ours, theirs = ([(r.step, r.group_id, r.prompt_id, r.index) for r in of_run] for of_run in rollouts)
    assert ours == theirs
    assert len(ours) == stop * 4 * 4
    first, expected_first = ([r.token_ids for r in of_run if r.step == 3] for of_run in rollouts)
    assert first == expected_first, "sampled from the loaded weights before anything has rounded otherwise"


def test_moments_may_move_to_host_memory(straight: Callable[[str, str], Path], folder: Path, tmp_path: Path) -> None:
    """As may what else only saves memory, where a run has met its end: named, and on a CPU not a bit different."""
    whole = straight("sft", "single-1")
    run_dir = copy(whole, tmp_path / "run")
    found = go_on(run_config(folder, run_dir, "single-1", SFT, optim=SFT["optim"] | {"offload": True}), 2)
    assert found.differences == ["optim.offload false -> true"]
    assert_same_run(run_dir, whole)


# --- what is refused, and what is taken instead


def cut(path: Path) -> None:
    file = max((path / "state").glob("*.safetensors"), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def another_model(path: Path) -> None:
    """Whole by its manifest, and of a model with another shape."""
    row = json.loads((path / "model.json").read_text())
    row["config"]["hidden_size"] += 8
    row["tensors"] = {name: [*shape[:-1], shape[-1] + 8] for name, shape in row["tensors"].items()}
    (path / "model.json").write_text(json.dumps(row))
    manifest.write(path)


def other_names(path: Path) -> None:
    row = json.loads((path / "driver.json").read_text())
    row["learning_rate"] = row.pop("applied_steps")
    (path / "driver.json").write_text(json.dumps(row))
    manifest.write(path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut to half": (cut, r"state/shard-\d+-model-\d+-of-\d+\.safetensors: expected \d+ bytes, found \d+"),
    "flipped bit": (lambda path: flip(next((path / "state").glob("*.safetensors"))), r"\.safetensors: its bytes changed"),
    "flipped bit in the manifest": (lambda path: flip(path / "manifest.json"), r"manifest\.json: changed since it was written"),
    "file missing": (lambda path: (path / "rng" / "driver.npz").unlink(), r"rng/driver\.npz: expected \d+ bytes, found no file"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json: no such file; its save was not finished"),
    "another model": (another_model, r"of another model: config\.json hidden_size: \d+ -> \d+; .*embed_tokens"),
    "other names": (other_names, r"names saved and restored differ: missing applied_steps; only saved learning_rate"),
    "renamed": (lambda path: path.rename(path.with_name("step-00000099")), r"step-00000099: holds step 6"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_taken(
    damage: str, straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    """Case 43. By name when it is asked for, and passed over with its reason when it is not."""
    run_dir = copy(straight("sft", "single-1"), tmp_path / "run")
    act, words = DAMAGES[damage]
    act(checkpoint_of(run_dir, STEPS))
    config = run_config(folder, run_dir, "single-1", SFT)
    found = resume.find(config, None)
    assert found is not None and found.state.step == STEPS - 1
    [skipped] = found.skipped
    assert skipped.path.name in ("step-00000006", "step-00000099")
    with pytest.raises(UserError, match=words):
        resume.find(config, skipped.path)
    assert f"skipped {skipped.path}: " in found.words()


def test_a_run_of_another_config_is_refused_naming_the_keys(straight: Callable[[str, str], Path], folder: Path) -> None:
    run_dir = straight("sft", "single-1")
    other = run_config(folder, run_dir, "single-1", SFT, optim=SFT["optim"] | {"lr": 2e-3}, seed=5)
    with pytest.raises(UserError, match=r"another config: seed 0 -> 5; optim\.lr 0\.001 -> 0\.002\."):
        resume.find(other, None)
    with pytest.raises(UserError, match=r"not a checkpoint of run_dir=.*name its run: run_dir="):
        resume.find(run_config(folder, folder / "elsewhere", "single-1", SFT), checkpoint_of(run_dir, 2))
    with pytest.raises(UserError, match="expected the directory of a checkpoint"):
        resume.find(run_config(folder, run_dir, "single-1", SFT), run_dir / "checkpoints" / "step-00000077")


def test_a_link_to_a_checkpoint_is_taken_and_a_directory_that_only_sounds_like_one_is_not(
    straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    run_dir = copy(straight("sft", "single-1"), tmp_path / "run")
    config = run_config(folder, run_dir, "single-1", SFT)
    (tmp_path / "latest").symlink_to(checkpoint_of(run_dir, 4))
    found = resume.find(config, tmp_path / "latest")
    assert found is not None and found.checkpoint.path == checkpoint_of(run_dir, 4)
    for name in ("step-4", "step-abc"):
        (run_dir / "checkpoints" / name).mkdir()
        with pytest.raises(UserError, match=rf"{name}: no name of a checkpoint; there are step-00000001, "):
            resume.find(config, run_dir / "checkpoints" / name)
    with pytest.raises(UserError, match=r"--resume /: expected the directory of a checkpoint"):
        resume.find(config, Path("/"))


def test_another_process_in_the_directory_and_records_that_cannot_be_written_are_refused(
    straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    run_dir = copy(straight("sft", "single-1"), tmp_path / "run")
    config = run_config(folder, run_dir, "single-1", SFT)
    before = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    with claim(run_dir):
        with pytest.raises(UserError, match="run_dir: another process runs in"):
            go_on(config, 2)
        with pytest.raises(UserError, match="run_dir: another process runs in"):
            train(config)
    assert {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()} == before
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"run_dir: cannot write into .*run: .*Is a directory: .*metrics\.jsonl"):
        go_on(config, 2)


def test_a_reference_whose_weights_have_changed_is_refused(straight: Callable[[str, str], Path], folder: Path, tmp_path: Path) -> None:
    """The folder that the run started from was trained on: the policy comes from the checkpoint, the reference would not."""
    run_dir = copy(straight("rl", "single-1"), tmp_path / "run")
    start = json.loads((run_dir / "start.json").read_text())
    model = copy(Path(start["model"]), tmp_path / "model")
    (run_dir / "start.json").write_text(json.dumps(start | {"model": str(model)}))
    config = run_config(folder, run_dir, "single-1", KINDS["rl"])
    assert resume.find(config, None) is not None
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"/model: its weights changed since the run started from them, and the reference"):
        resume.find(config, None)
    (run_dir / "start.json").write_text('{"model": "/wo')
    with pytest.raises(UserError, match=r"start\.json: not whole"):
        resume.find(config, None)


def test_a_place_that_the_backend_cannot_take_is_refused_before_the_warm_up(folder: Path, tmp_path: Path) -> None:
    forever = {"steps": 10**9, "batch_size": 1, "data": {"task": "sort"}}
    with pytest.raises(UserError, match=r"backend\.name=single runs in one process, got runtime\.ranks=2"):
        train(run_config(folder, tmp_path / "run", "single-2", RL, warmup=forever))
    assert not (tmp_path / "run").exists()


def test_a_run_without_checkpoints_starts_from_the_beginning(folder: Path, tmp_path: Path) -> None:
    assert resume.find(run_config(folder, tmp_path / "new", "single-1", SFT), None) is None


def test_a_finished_run_says_so_and_goes_on_when_there_is_more_to_do(
    straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    run_dir = copy(straight("sft", "single-1"), tmp_path / "run")
    constant = {"optim": {"lr": 1e-3}}
    short = train(run_config(folder, tmp_path / "short", "single-1", SFT | constant, max_steps=4))
    found = resume.find(run_config(folder, run_dir, "single-1", SFT), None)
    assert found is not None and found.finished
    long = run_config(folder, short, "single-1", SFT | constant)
    assert go_on(long).exact
    assert_same_run(short, train(run_config(folder, tmp_path / "long", "single-1", SFT | constant)))


def test_a_run_that_cannot_go_on_is_left_as_it_was(straight: Callable[[str, str], Path], folder: Path, tmp_path: Path) -> None:
    run_dir = copy(straight("sft", "single-1"), tmp_path / "run")
    before = {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}
    config = run_config(folder, run_dir, "single-2", SFT)  # this backend has one rank
    with pytest.raises(UserError):
        go_on(config, 2)
    assert {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()} == before


# --- killed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_everything_is_told_to_end_at_once_and_the_run_goes_on_bit_equal(
    number: signal.Signals, straight: Callable[[str, str], Path], folder: Path, tmp_path: Path
) -> None:
    """The whole process group: driver, ranks, and the server that they are forked from. SIGTERM saves first, although none was due."""
    run_dir, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    every = 100 if number == signal.SIGTERM else 1
    config = run_config(folder, run_dir, "ddp-2", KINDS["rl"], checkpoint={"every": every, "keep": STEPS})
    configs.dump(config, recipe)
    tree = yaml.safe_load(recipe.read_text())
    assert tree["checkpoint"]["every"] == every
    (folder / "slow").touch()
    with running("train", str(recipe)) as process:
        deadline = time.monotonic() + 120
        while not (run_dir / "metrics.jsonl").is_file() or (run_dir / "metrics.jsonl").read_text().count("\n") < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        told = time.monotonic()
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL), output
    assert time.monotonic() - told < 30
    (folder / "slow").unlink()
    done = len(read_steps(run_dir))
    assert 2 <= done < STEPS
    found = go_on(run_config(folder, run_dir, "ddp-2", KINDS["rl"]))
    assert found.exact
    if number == signal.SIGTERM:
        assert f"--resume goes on after step {done}" in output
        assert found.state.step == done
    else:
        assert done - 1 <= found.state.step <= done, "more than the save interval was lost"
    assert_same_run(run_dir, straight("rl", "ddp-2"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing is left of the group
