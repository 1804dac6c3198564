"""LoRA through the command line: two placements train alike, KL begins at zero, a run goes on from its checkpoint, both exports agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from drumroll.observe.run import read_run
from tests.e2e.command_line import RECIPE, drumroll_here
from tests.e2e.test_train import SMALL

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(400)

LORA = [*SMALL, "model.lora.rank=8", "algorithm.kl.coef=0.04", "optim.lr=3e-3", "optim.warmup_steps=0", "checkpoint.every=2"]


def run(run_dir: Path, *arguments: str) -> Path:
    drumroll_here("train", RECIPE, *LORA, f"run_dir={run_dir}", *arguments)
    return run_dir


def test_a_lora_run_on_two_placements_and_on_from_its_checkpoint(tmp_path: Path) -> None:
    one = run(tmp_path / "single", "backend.name=single", "runtime.ranks=1")
    two = run(tmp_path / "fsdp2", "engine.transformers.adapters=apart")
    records = read_run(two).rl
    for ours, theirs in zip(records, read_run(one).rl, strict=True):
        assert ours.tokens_digest == theirs.tokens_digest
        assert theirs.grad_norm > 0
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    kls = [record.kl for record in records]
    assert kls[0] == 0.0  # case 56: the reference is the policy with its adapter off
    assert kls[2] is not None
    assert kls[2] > 1e-5
    summary = json.loads((two / "summary.json").read_text())
    assert summary["weight_pushes"] == summary["digests_matched"] == 4
    assert summary["logprob_gap_mean"] < 1e-5

    start = json.loads((two / "start.json").read_text())["model"]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), two / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(two / "model").eval()
    ids = torch.arange(3, 30)[None]
    assert (adapted(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max() < 1e-4

    weights = (two / "model" / "model.safetensors").read_bytes()
    for later in (two / "checkpoints").glob("step-*3"):
        later.rename(tmp_path / "put aside")  # as if the run had been killed after step 2
    drumroll_here("train", RECIPE, *LORA, f"run_dir={two}", "engine.transformers.adapters=apart", "--resume")
    assert (two / "model" / "model.safetensors").read_bytes() == weights
    assert [record.step for record in read_run(two).rl] == [1, 2, 3]
