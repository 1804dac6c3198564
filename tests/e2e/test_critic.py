"""Actor-critic PPO through the whole loop: what trains when, an exact resume of both, another backend, replay, and refusals."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumroll import config as configs
from drumroll.algorithms.presets import resolve as resolve_algorithm
from drumroll.backends.state import read as read_checkpoint
from drumroll.checkpoint import manifest
from drumroll.checkpoint.store import Checkpoint
from drumroll.config import RunConfig
from drumroll.errors import UserError
from drumroll.observe import batches
from drumroll.observe.run import read_run, read_steps
from drumroll.observe.summary import read_summary
from drumroll.pipelines import replay, resume, rl
from drumroll.pipelines.critic import critic_start
from drumroll.runtime.learner import critic_learner
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec

STEPS = 4
pytestmark = pytest.mark.timeout(300)

TREE: dict[str, Any] = {
    "max_steps": STEPS,
    "model": {"path": "builtin:llama-0.8m"},
    "data": {"train": {"task": "sort", "options": {"digits": 3}, "rows": 10}, "max_prompt_tokens": 24},
    "rollout": {"prompts_per_step": 8, "max_tokens": 6},
    "engine": {"name": "transformers"},
    "algorithm": {
        "name": "ppo", "minibatches": 2, "lam": 0.9, "kl": {"coef": 0.01}, "critic": {"lr": 3e-3, "warmup_steps": 1},
    },
    "optim": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
    "checkpoint": {"every": 1, "keep": STEPS},
    "record": {"digests": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("critic")
    (made / "reward.py").write_text("def digits(rollout, prompt):\n    return sum(c.isdigit() for c in rollout.text) / 6\n")
    return made


def run_config(folder: Path, run_dir: Path, name: str = "fsdp2", ranks: int = 2, **changes: Any) -> RunConfig:
    rewards = {"rewards": [{"fn": f"{folder}/reward.py:digits", "isolate": False}]}
    placed = {"run_dir": str(run_dir), "backend": {"name": name}, "runtime": {"ranks": ranks, "device": "cpu"}}
    return configs.parse(TREE | rewards | placed | changes)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    run = run_config(folder, folder / "straight")
    rl.train(run)
    return Path(run.run_dir)


def digests_of(run_dir: Path) -> dict[int, dict[str, str]]:
    rows = map(json.loads, (run_dir / "digests.jsonl").read_text().splitlines())
    return {row["step"]: row["digests"] for row in rows}


def moved(before: dict[str, str], after: dict[str, str], critic: bool) -> int:
    return sum(before[name] != after[name] for name in before if name.startswith("critic.") == critic)


def test_a_run_trains_both_the_critic_first(straight: Path) -> None:
    records, digests = read_run(straight).rl, digests_of(straight)
    assert [record.optimizer_steps for record in records] == [0, 2, 2, 2]
    weights = sum(not name.startswith("critic.") for name in digests[0])
    assert [moved(digests[step - 1], digests[step], critic=False) for step in range(1, STEPS + 1)] == [0, *[weights] * 3]
    valued = weights  # of untied models the value head takes the language-model head's place
    assert [moved(digests[step - 1], digests[step], critic=True) for step in range(1, STEPS + 1)] == [valued] * STEPS
    for record in records:
        assert record.value_loss is not None and record.critic_grad_norm is not None and record.explained_variance is not None
        assert record.value_loss > 0 and record.critic_grad_norm > 0
        assert record.no_variance_share is None  # groups of one
    rates = [record.critic_lr for record in records]
    assert rates[0] == pytest.approx(3e-3 / 2)  # the first of two warm-up steps of its own schedule
    assert records[0].lr == records[1].lr == pytest.approx(1e-3 / 2)  # the policy's has not begun
    summary = read_summary(straight / "summary.json")
    assert summary is not None
    assert summary.predicted_state_bytes_per_rank == pytest.approx(max(summary.state_bytes_per_rank), rel=0.05)


def test_batches_hold_what_gae_gave(straight: Path) -> None:
    """Advantages of a batch have mean 0 and deviation 1 over its tokens; those of one response differ from token to token."""
    for step in range(1, STEPS + 1):
        samples = batches.read(batches.path(straight / "batches", step))
        found = np.concatenate([sample.advantages for sample in samples if sample.advantages is not None])
        assert abs(found.mean()) < 1e-6
        assert found.std() == pytest.approx(1.0, abs=1e-4)
        assert any(sample.advantages is not None and np.ptp(sample.advantages) > 0 for sample in samples)
        assert all(sample.values is not None and sample.returns is not None for sample in samples)


def test_resume_is_exact_for_both(folder: Path, straight: Path) -> None:
    run = run_config(folder, folder / "resumed")
    shutil.copytree(straight, run.run_dir)
    found = resume.find(run, Path(run.run_dir) / "checkpoints" / "step-00000002")
    assert found is not None and found.exact
    rl.train(run, found)
    ours, theirs = read_steps(Path(run.run_dir)), read_steps(straight)
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "critic_lr", "explained_variance", "tokens_digest", "lr"):
            assert repr(getattr(mine, name)) == repr(getattr(other, name)), (mine.step, name)
    assert digests_of(Path(run.run_dir)) == digests_of(straight)
    ends = [Checkpoint(path / "checkpoints" / f"step-{STEPS:08d}") for path in (Path(run.run_dir), straight)]
    for part in ("tensors", "critic"):
        first, second = (read_checkpoint(getattr(end, part)) for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert ends[0].state().critic_applied_steps == 2 * STEPS
    assert ends[0].state().applied_steps == 2 * (STEPS - 1)


def test_a_critic_that_began_as_another_model_is_no_critic_of_this_run(folder: Path, straight: Path) -> None:
    """By its own config and shapes, as the policy is; a checkpoint of before they were written down goes on."""
    run = run_config(folder, folder / "another critic")
    shutil.copytree(straight, run.run_dir)
    place = Path(run.run_dir) / "checkpoints" / "step-00000002"
    file = place / "critic.json"
    row = json.loads(file.read_text())
    row["config"]["hidden_size"] += 8
    file.write_text(json.dumps(row))
    manifest.write(place)
    with pytest.raises(UserError, match=r"step-00000002: of another critic: config\.json hidden_size: \d+ -> \d+"):
        resume.find(run, place)
    file.unlink()
    manifest.write(place)
    found = resume.find(run, place)
    assert found is not None and found.exact


def test_another_backend_goes_on_with_the_same_numbers(folder: Path, straight: Path) -> None:
    run = run_config(folder, straight, "single", 1)
    assert run.algorithm is not None
    algorithm = resolve_algorithm(run.algorithm, 6)
    source = resume.start_model(straight, run)
    start = critic_start(run, algorithm, source)
    with launch(partial(Worker, spec=WorkerSpec(run, source, plan(run, False, critic=True), start)), 1, "cpu") as ranks:
        policy = Policy(ranks, run, 1, critic_learner(ranks, run, algorithm.critic, 1))
        checkpoint = Checkpoint(straight / "checkpoints" / "step-00000003")
        policy.restore(checkpoint, checkpoint.state(), generators=False)
        assert {name: f"{value:016x}" for name, value in policy.digests().items()} == digests_of(straight)[3]
        assert policy.critic is not None and policy.critic.applied_steps == 6
        assert policy.memory()[0]["critic"] > 0


def test_replay_trains_the_policy_again_without_a_critic(straight: Path, tmp_path: Path) -> None:
    place = ("backend.name=ddp", "runtime.ranks=2")
    assert replay.replay(f"{straight}@3", place, tmp_path / "rows.json")  # from step 2's checkpoint
    shutil.copytree(straight, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    assert replay.replay(f"{tmp_path / 'copy'}@3", ("backend.name=single", "runtime.ranks=1"), None)  # over the step that was the critic's
    with pytest.raises(UserError, match="step 1 trained the critic alone"):
        replay.replay(f"{straight}@1", place, None)


def test_by_turns_with_adapters_on_shared_sequences(folder: Path, straight: Path) -> None:
    """The policy has adapters, the critic trains its last block and its head; both sleep while the engine samples; sequences are shared."""
    algorithm = TREE["algorithm"] | {"kl": {"coef": 0.01}, "critic": {"lr": 3e-3, "trainable": [r"layers\.3\."]}}
    model = TREE["model"] | {"lora": {"rank": 2}}
    run = run_config(folder, folder / "turns", algorithm=algorithm, model=model, max_steps=2, checkpoint={},
                     backend={"name": "fsdp2", "fsdp2": {"sequence_ranks": 2}},
                     runtime={"ranks": 2, "device": "cpu", "take_turns": True})  # fmt: skip
    rl.train(run)
    digests = digests_of(Path(run.run_dir))
    changed = {name for name in digests[0] if digests[0][name] != digests[2][name]}
    assert changed
    assert all("lora_" in name or name == "critic.score.weight" or name.startswith("critic.model.layers.3.") for name in changed)
    assert "critic.score.weight" in changed


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        ({"warmup_steps": STEPS}, "expected fewer than max_steps=4; the policy would never train"),
        ({"path": "no/such/folder/there"}, "no such folder"),
        ({"trainable": ["nonesuch"]}, "algorithm.critic.trainable: 'nonesuch' matches no parameter"),
    ],
)
def test_refusals_before_anything_is_launched(folder: Path, tmp_path: Path, critic: dict[str, Any], message: str) -> None:
    run = run_config(folder, tmp_path / "run", "single", 1, algorithm={"name": "ppo", "critic": critic})
    with pytest.raises(UserError, match=message):
        rl.train(run)
    assert not Path(run.run_dir).exists()
