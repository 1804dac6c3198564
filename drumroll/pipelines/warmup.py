"""The model that RL starts from: as it is, or after a short supervised warm-up that is made once and kept by digest."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path

from drumroll import env
from drumroll.config import NamedSection, OptimConfig, RolloutConfig, RunConfig, RuntimeConfig, TrainConfig, WarmupConfig
from drumroll.models.locate import locate
from drumroll.observe.recorder import Recorder
from drumroll.pipelines import sft
from drumroll.pipelines.length import check_length
from drumroll.plugins import SPECIFICATION_BACKEND
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec

VERSION = 1  # raise when the same config would give other weights: old folders in the cache are then not found


def starting_model(config: RunConfig, recorder: Recorder | None) -> Path:
    """Folder of the model that the run starts from; runs the warm-up when the cache does not have it.

    Raises UserError when there is no such model, or the recipe's sequences are longer than what it was built for.
    """
    folder = locate(config.warmup if isinstance(config.warmup, str) else config.model.path)
    check_length(config, folder)
    if not isinstance(config.warmup, WarmupConfig):
        return folder
    run = warmup_config(config, config.warmup)
    out = env.read().cache / "warmups" / _key(run, folder)
    if out.is_dir():
        if recorder is not None:
            recorder.note(f"warm-up: {config.warmup.steps} steps of SFT, found in the cache: {out}")
        return out
    if recorder is not None:
        recorder.note(f"warm-up: {config.warmup.steps} steps of SFT on the {SPECIFICATION_BACKEND} backend")
    samples = sft.open_samples(run, folder, "warmup.data" if config.warmup.data is not None else "data.train")
    with launch(partial(Worker, spec=WorkerSpec(run, folder, plan(run, reference=False))), ranks=1, device=run.runtime.device) as ranks:
        policy = Policy(ranks, run, total_steps=run.max_steps)
        sft.fit(policy, samples, run, recorder)
        if not out.is_dir():  # another run of the recipe may have made it meanwhile, and be reading it
            out.parent.mkdir(parents=True, exist_ok=True)
            policy.export(out)
    return out


def warmup_config(config: RunConfig, warmup: WarmupConfig) -> RunConfig:
    """The warm-up as an SFT run of its own: one rank, always the specification backend, so that every run of the recipe starts alike."""
    return RunConfig(
        pipeline="sft",
        max_steps=warmup.steps,
        run_dir=config.run_dir,
        seed=warmup.seed,
        model=config.model.model_copy(update={"trainable": (), "lora": None}),
        data=config.data.model_copy(update={"train": warmup.data or config.data.train, "eval": None}),
        rollout=RolloutConfig(max_tokens=config.rollout.max_tokens),
        optim=OptimConfig(lr=warmup.lr, schedule="linear", warmup_steps=max(1, warmup.steps // 10), min_lr_ratio=0.1),
        train=TrainConfig(batch_size=warmup.batch_size, micro_batch_tokens=config.train.micro_batch_tokens),
        backend=NamedSection(name=SPECIFICATION_BACKEND),
        runtime=RuntimeConfig(device=config.runtime.device),
    )


def _key(run: RunConfig, folder: Path) -> str:
    """Digest of all that the warm-up's weights depend on: its config, the model's files, and our version."""
    digest = hashlib.sha256()
    facts = run.model_dump(mode="json", exclude={"run_dir": True, "model": {"path"}})
    digest.update(json.dumps([VERSION, facts], sort_keys=True).encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(file.name.encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
