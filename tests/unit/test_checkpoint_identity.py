"""What tells one run from another, and the generators of a process: by name, with their values."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumroll import config as configs
from drumroll import plugins
from drumroll.checkpoint import identity, rng
from drumroll.checkpoint.identity import compare_configs
from drumroll.config import RunConfig
from drumroll.errors import RunError
from drumroll.models import builtin

TREE: dict[str, Any] = {
    "max_steps": 5,
    "run_dir": "r",
    "model": {"path": "m"},
    "data": {"train": {"task": "sort"}},
    "rewards": [{"fn": "exact"}],
    "backend": {"name": plugins.SPECIFICATION_BACKEND},
    "engine": {"name": plugins.EMBEDDED_ENGINE},
    "algorithm": {"name": "grpo"},
}


def run(**changes: Any) -> RunConfig:
    return configs.parse(TREE | changes)


@pytest.mark.parametrize(
    ("changes", "refused", "elastic"),
    [
        ({"run_dir": "s", "checkpoint": {"every": 3}, "record": {"tensorboard": False}, "eval": {"every": 2}, "max_steps": 9}, [], []),
        ({"runtime": {"ranks": 2, "timeout_s": 5.0}}, [], ["runtime.ranks 1 -> 2"]),
        ({"backend": {"name": "x", "x": {"mesh": [2, 1]}}}, [], ['backend.name "single" -> "x"', "backend.x.mesh null -> [2, 1]"]),
        ({"optim": {"lr": 0.5}, "seed": 7}, ["seed 0 -> 7", "optim.lr 1e-06 -> 0.5"], []),
        ({"model": {"path": "other", "dtype": "float32"}}, ['model.path "m" -> "other"'], ['model.dtype "auto" -> "float32"']),
        ({"data": {"train": {"task": "larger"}}}, ['data.train.task "sort" -> "larger"'], []),
        ({"rewards": [{"fn": "exact", "weight": 2.0}]}, ["rewards [{"], []),
        ({"algorithm": {"name": "grpo", "kl": {"coef": 0.5}}}, ["algorithm.kl.coef null -> 0.5"], []),
    ],
)
def test_what_may_change_and_what_may_not(changes: dict[str, Any], refused: list[str], elastic: list[str]) -> None:
    found = compare_configs(run(), run(**changes))
    for got, expected in ((found.refused, refused), (found.elastic, elastic)):
        assert len(got) == len(expected) and all(line.startswith(text) for line, text in zip(got, expected, strict=True)), got


def test_more_steps_are_another_schedule_unless_it_is_constant() -> None:
    cosine = {"optim": {"schedule": "cosine"}}
    assert compare_configs(run(), run(max_steps=9)).elastic == []
    [word] = compare_configs(run(**cosine), run(**cosine, max_steps=9)).elastic
    assert word == "max_steps 5 -> 9 (optim.schedule=cosine is laid over them)"


def test_a_config_equals_itself_after_dump_and_load(tmp_path: Path) -> None:
    algorithm = {"name": "dapo", "kl": {"coef": 0.1}}
    config = run(optim={"lr": 0.5, "schedule": "cosine"}, backend={"name": "x", "x": {"a": 1}}, algorithm=algorithm)
    configs.dump(config, tmp_path / "c.yaml")
    found = compare_configs(configs.load(tmp_path / "c.yaml"), config)
    assert found.refused == found.elastic == []


def test_a_model_is_told_by_its_config_and_its_shapes(tmp_path: Path) -> None:
    folder = builtin.folder("llama-0.8m", tmp_path)
    model = identity.fingerprint(folder)
    stored = json.loads((folder / "config.json").read_text())
    assert sum(model.elements().values()) == sum(torch.Size(shape).numel() for shape in model.tensors.values()) > 700_000
    assert "transformers_version" in stored and "transformers_version" not in model.config
    file = tmp_path / "model.json"
    file.write_text(identity.dump(model))
    identity.check_model(file, model)
    other = identity.Fingerprint({**model.config, "rope_theta": 5.0}, {**model.tensors, "model.norm.weight": [7]})
    with pytest.raises(RunError, match=r"of another model: config\.json rope_theta: .* -> 5\.0; model\.norm\.weight: \[\d+\] -> \[7\]"):
        identity.check_model(file, other)


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves half of a pair behind
    np.random.standard_normal()
    rng.write(tmp_path / "g.npz", rng.capture())

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), float(torch.rand(()))]

    first = draw()
    assert draw() != first
    rng.restore(rng.read(tmp_path / "g.npz"), "here")
    assert draw() == first
    rng.seed(5)
    second = draw()
    rng.seed(5)
    assert draw() == second != first


def test_generators_are_restored_by_name() -> None:
    states = rng.capture()
    states["tensorflow"] = states.pop("numpy")
    with pytest.raises(RunError, match=r"here: names saved and restored differ: missing numpy; only saved tensorflow"):
        rng.restore(states, "here")


def test_a_process_need_not_use_the_gpu_that_it_used() -> None:
    states = rng.capture() | {"cuda": np.zeros(16, np.uint8)}
    expected = torch.rand(())
    rng.restore(states, "here")
    assert torch.rand(()) == expected
