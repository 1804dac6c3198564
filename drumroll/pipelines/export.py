"""Write the model of a checkpoint as a HF folder, or its adapters for PEFT, and hold it against the model that was loaded.

The run's own ranks hold the model, as its backend shards it; they gather it bucket by bucket and rank 0 writes: no rank holds it whole.
The check does: it loads what was written with plain transformers. A model whose files are more than a quarter of the free memory is not
checked, and that is said.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM

from drumroll.checkpoint.store import Checkpoint, CheckpointStore, step_of
from drumroll.config import RunConfig
from drumroll.errors import RunError, UserError
from drumroll.models import lora
from drumroll.models.export import check_out
from drumroll.pipelines.place import check_place
from drumroll.pipelines.recipe import read_of_run
from drumroll.pipelines.resume import CHECKPOINTS_DIR, start_model
from drumroll.runtime.local import launch, resolve_device
from drumroll.runtime.plan import Plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec, model_spec
from drumroll.types import TrainSample

# Largest difference of a log-prob between the live model and what was written, in nats: rounding of matmuls in fp32, of weights in bf16.
GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.25}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBES, _PROBE_TOKENS = 4, 24


@dataclass(slots=True, frozen=True)
class Target:
    """What to write."""

    dtype: torch.dtype = torch.float32
    adapter: bool = False
    shard_bytes: int = 4 << 30


def export(run: str, out: Path, overrides: Sequence[str], target: Target) -> None:
    """`drumroll export RUN[@STEP] OUT`. Raises UserError for a run or step that is not there, RunError when the check fails."""
    run_dir, step, config = read_of_run(run, overrides)
    if target.adapter and config.model.lora is None:
        raise UserError(f"--adapter: {run_dir} has no adapters (model.lora); leave that out")
    check_out(out)
    check_place(config)
    checkpoint = _checkpoint(CheckpointStore(run_dir / CHECKPOINTS_DIR, config.checkpoint), step)
    source = start_model(run_dir, config)
    spec = WorkerSpec(config, source, Plan(config.runtime.ranks, frozenset({"policy"})))
    with launch(partial(Worker, spec=spec), config.runtime.ranks, config.runtime.device, config.runtime.timeout_s) as ranks:
        policy = Policy(ranks, config, total_steps=1)
        _restore(policy, checkpoint)
        if target.adapter:
            policy.export_adapter(out)
            told = check(source, policy, config, adapter=out)
        else:
            policy.export(out, target.dtype, target.shard_bytes)
            told = check(out, policy, config, target.dtype)
    Console().print(f"{checkpoint.path} -> {out} ({told})", markup=False, highlight=False, soft_wrap=True)


def check(
    folder: Path, policy: Policy, config: RunConfig, dtype: torch.dtype = torch.float32, adapter: Path | None = None
) -> str:
    """Load a folder with plain transformers (`adapter`: under this PEFT folder) and compare log-probs with the live policy's; in words.

    `dtype`: of the weights written. Raises RunError when keys are missing or unexpected, or a log-prob is too far off.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * size > free:
        return f"not checked: {size / 2**30:.1f} GiB of weights, {free / 2**30:.1f} GiB of memory free"
    probes = _probes(json.loads((folder / "config.json").read_text()))
    temperature = config.rollout.temperature if config.pipeline == "rl" else 1.0
    live = policy.logprobs("policy", probes)
    written = _logprobs(_load(folder, adapter, config.model.trust_remote_code), probes, temperature)
    gap = max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(written, live, strict=True))
    live_spec = model_spec(config, folder, torch.device(resolve_device(config.runtime.device, config.runtime.ranks)))
    low = live_spec.compute_dtype is torch.bfloat16 or (live_spec.lora is not None and live_spec.lora.base_dtype is torch.bfloat16)
    bound = GAPS[torch.bfloat16 if low else dtype]
    if not gap <= bound:
        raise RunError(
            f"{adapter or folder}: loaded with transformers, its log-probs are {gap:.2g} off the live model's, expected at most {bound:g}"
        )
    return f"loaded with transformers, log-probs within {gap:.1e} of the live model's"


def _checkpoint(store: CheckpointStore, step: int | None) -> Checkpoint:
    paths = store.paths()
    if not paths:
        raise UserError(f"{store.folder}: no checkpoint there; set checkpoint.every, or take the folder `model` of a completed run")
    if step is None:
        return _newest(store, paths)
    found = [path for path in paths if step_of(path) == step]
    if not found:
        raise UserError(f"@{step}: no checkpoint of that step; there are {', '.join(str(step_of(path)) for path in paths)}")
    return store.open(found[0])


def _newest(store: CheckpointStore, paths: Sequence[Path]) -> Checkpoint:
    """The newest that is whole; what is passed over is said. Raises RunError when none is."""
    for path in reversed(paths):
        try:
            return store.open(path)
        except RunError as error:
            print(f"skipped {path}: {error}", file=sys.stderr)
    raise RunError(f"{store.folder}: no checkpoint there is whole")


def _restore(policy: Policy, checkpoint: Checkpoint) -> None:
    """Raises RunError also when the run, still training, has removed the checkpoint meanwhile."""
    try:
        policy.restore(checkpoint, checkpoint.state(), generators=False)
    except RunError as error:
        if checkpoint.path.is_dir():
            raise
        raise RunError(
            f"{checkpoint.path}: removed while it was read: its run is training and keeps the newest only; export again, or raise "
            "checkpoint.keep"
        ) from error


def _probes(config: dict[str, object]) -> list[TrainSample]:
    """Random tokens, the same for every model of that vocabulary."""
    vocabulary = config["vocab_size"]
    assert isinstance(vocabulary, int)
    rng = np.random.default_rng(0)
    mask = np.arange(_PROBE_TOKENS) > 0
    return [TrainSample(rng.integers(0, vocabulary, _PROBE_TOKENS), mask) for _ in range(_PROBES)]


def _load(folder: Path, adapter: Path | None, trust_remote_code: bool) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    model, info = found
    wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise RunError(f"{folder}: transformers finds the tensors wrong: {wrong}")
    loaded: nn.Module = model if adapter is None else lora.with_folder(model, adapter)
    return loaded.eval()


@torch.no_grad()
def _logprobs(model: nn.Module, probes: Sequence[TrainSample], temperature: float) -> list[np.ndarray]:
    scores = []
    for probe in probes:
        ids = torch.from_numpy(probe.token_ids)[None]
        log_p = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
        scores.append(log_p[:-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy())
    return scores
