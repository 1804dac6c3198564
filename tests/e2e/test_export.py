"""`drumroll export`: the model of a checkpoint as a folder for plain transformers, held against the live one. Failure cases 46 and 47."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumroll import config as configs
from drumroll.errors import RunError
from drumroll.pipelines import export
from tests.e2e.command_line import RECIPE, drumroll_here

SMALL = ["warmup=null", "rollout.prompts_per_step=4", "algorithm.group_size=2", "eval.rows=4", "max_steps=2", "checkpoint.every=1"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "reward.py").write_text("def length(rollout, prompt):\n    return float(len(rollout.text))\n")
    rewards = f"rewards=[{{fn: '{folder}/reward.py:length', isolate: false}}]"
    drumroll_here("train", RECIPE, *SMALL, f"run_dir={folder / 'run'}", rewards, "optim.lr=1e-2", "optim.warmup_steps=0")
    return folder / "run"


def test_the_newest_checkpoint_is_the_model_that_the_run_left(run_dir: Path, tmp_path: Path) -> None:
    said = drumroll_here("export", str(run_dir), str(tmp_path / "model"))
    assert "step-00000002" in said
    assert "loaded with transformers, log-probs within" in said
    ours, left = load_file(tmp_path / "model" / "model.safetensors"), load_file(run_dir / "model" / "model.safetensors")
    assert ours.keys() == left.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in left.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([5, 6]) != ""


def test_an_older_step_in_bfloat16_in_several_files_from_other_ranks(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    place = ["backend.name=single", "runtime.ranks=1"]
    drumroll_here("export", f"{run_dir}@1", str(out), *place, "--dtype", "bfloat16", "--shard-gib", "0.0005")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    newest = load_file(run_dir / "model" / "model.safetensors")
    assert index.keys() == newest.keys()
    with safe_open(out / index["model.norm.weight"], framework="pt") as reader:
        norm = reader.get_tensor("model.norm.weight")
    assert norm.dtype == torch.bfloat16
    assert not torch.equal(norm, newest["model.norm.weight"].bfloat16())  # the second step is not in it
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_what_is_not_there_is_refused(run_dir: Path, tmp_path: Path) -> None:
    assert "no checkpoint of that step; there are 1, 2" in drumroll_here("export", f"{run_dir}@7", str(tmp_path / "out"), code=2)
    assert "has no adapters" in drumroll_here("export", str(run_dir), str(tmp_path / "out"), "--adapter", code=2)
    assert "--dtype int4: expected float32" in drumroll_here("export", str(run_dir), str(tmp_path / "out"), "--dtype", "int4", code=2)
    assert "not the directory of a run: no config.yaml in it" in drumroll_here("export", str(tmp_path), str(tmp_path / "out"), code=2)
    assert not (tmp_path / "out").exists()


class LivePolicy:
    """Log-probs of the model that the run left, `off` by as much as a lower compute dtype may be."""

    def __init__(self, folder: Path, off: float = 0.0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.off = off

    def logprobs(self, role: str, samples: Any) -> list[np.ndarray]:
        return [scores + self.off for scores in export._logprobs(self.model, samples, 1.0)]


def test_a_live_model_that_computes_in_bfloat16_may_be_further_off(run_dir: Path) -> None:
    policy: Any = LivePolicy(run_dir / "model", off=0.05)
    config = configs.load(run_dir / "config.yaml", ["model.dtype=bfloat16"])
    assert "log-probs within 5.0e-02" in export.check(run_dir / "model", policy, config)
    with pytest.raises(RunError, match=r"expected at most 0\.0001"):
        export.check(run_dir / "model", policy, configs.load(run_dir / "config.yaml"))


@pytest.mark.parametrize("fault", ["a norm scaled", "a tensor missing"])
def test_a_folder_that_is_not_the_live_model_is_found_out(run_dir: Path, tmp_path: Path, fault: str) -> None:
    out = tmp_path / "model"
    drumroll_here("export", str(run_dir), str(out))
    tensors = load_file(out / "model.safetensors")
    if fault == "a norm scaled":
        tensors["model.norm.weight"] *= 1.5
    else:
        del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = configs.load(run_dir / "config.yaml")
    expected = "expected at most 0.0001" if fault == "a norm scaled" else r"missing_keys.*up_proj"
    with pytest.raises(RunError, match=expected):
        export.check(out, LivePolicy(run_dir / "model"), config)  # type: ignore[arg-type]
