"""The backend of docs/plugins.md, in a folder of its own and named by `module:Name`: a run trains with it, and `verify` proves it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from drumroll import config
from drumroll.cli import app
from drumroll.observe.checks import read_rows
from drumroll.observe.run import read_run
from drumroll.pipelines import rl
from drumroll.types import Prompt, Rollout
from drumroll.verify import subjects
from tests.contract.backend_runs import relative

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_backend\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "written_elsewhere.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "written_elsewhere:PLUGIN"


def odd_tokens(rollout: Rollout, prompt: Prompt) -> float:
    """A reward that a model with random weights gets some of."""
    return sum(token % 2 for token in rollout.token_ids) / len(rollout.token_ids)


def train(run_dir: Path, backend: str, ranks: int) -> Path:
    tree: dict[str, Any] = {
        "max_steps": 2,
        "run_dir": str(run_dir),
        "model": {"path": "builtin:llama-0.8m"},
        "data": {"train": {"task": "sort", "options": {"digits": 3}}, "max_prompt_tokens": 24},
        "rollout": {"prompts_per_step": 4, "max_tokens": 6},
        "rewards": [{"fn": f"{__file__}:odd_tokens", "isolate": False}],
        "algorithm": {"name": "grpo", "group_size": 4},
        "optim": {"lr": 1e-3},
        "backend": {"name": backend},
        "engine": {"name": "transformers"},
        "runtime": {"ranks": ranks, "device": "cpu"},
    }
    rl.train(config.parse(tree))
    return run_dir


def test_a_run_trains_with_it_as_with_the_specification(name: str, tmp_path: Path) -> None:
    """The same responses, norms and weights; every push arrived as it was sent."""
    ours, theirs = train(tmp_path / "ours", name, 2), train(tmp_path / "theirs", "single", 1)
    for mine, expected in zip(read_run(ours).rl, read_run(theirs).rl, strict=True):
        assert mine.tokens_digest == expected.tokens_digest
        assert mine.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5) and mine.grad_norm > 0
    weights, expected_weights = (load_file(path / "model" / "model.safetensors") for path in (ours, theirs))
    assert max(relative(weights[key], tensor) for key, tensor in expected_weights.items()) < 1e-5
    assert json.loads((ours / "summary.json").read_text())["status"] == "completed"


def test_verify_proves_it(name: str, tmp_path: Path) -> None:
    subject = subjects.builtin(tmp_path / "models")[-1]
    arguments = ["verify", name, "--model", subject.path, "--only", "one block", "--json", str(tmp_path / "rows.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "rows.json")
    assert {(row.backend, row.ranks) for row in rows} == {(name, 2)}
    assert {"gradients", "parameters after 3 steps", "state as restored", "memory: all tensors"} <= {row.check for row in rows}
