"""What one rank hosts: the policy, a critic and a frozen reference where the algorithm asks for one, and an embedded engine.

Verbs are the driver's calls. Every rank gets the same verbs in the same order with the same number of micro-batches, so collectives match.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers

from drumroll import plugins
from drumroll.backends.base import KINDS, Backend, LoraSpec, ModelSpec, OptimSpec, RankContext, StepResult
from drumroll.checkpoint import rng
from drumroll.checkpoint.store import Checkpoint, CheckpointStore
from drumroll.config import LoraConfig, ModelConfig, RunConfig
from drumroll.engines.base import Completion, Engine, EngineSpec, GenerateRequest
from drumroll.errors import RunError
from drumroll.models.export import save_adapter, save_folder
from drumroll.packing import collate
from drumroll.runtime.plan import Plan
from drumroll.sync.base import PushReport, Transport
from drumroll.types import Denominators, LossFn, MicroBatch, Stat, TrainSample

Scored = Literal["policy", "reference"]
Trained = Literal["policy", "critic"]


@dataclass(slots=True, frozen=True)
class CriticStart:
    """What a critic begins as."""

    folder: Path  # HF model folder of its body
    trainable: tuple[str, ...] = ()  # see ModelSpec


@dataclass(slots=True, frozen=True)
class WorkerSpec:
    """Everything a rank needs to build its roles; picklable."""

    config: RunConfig
    folder: Path  # HF model folder that policy, reference and engine start from
    plan: Plan
    critic: CriticStart | None = None  # of a plan with that role


@dataclass(slots=True, frozen=True)
class TrainReport:
    """One rank's part of one optimizer step."""

    result: StepResult
    stats: dict[str, Stat]


@dataclass(slots=True, frozen=True)
class SaveReport:
    """What has become of one rank's part of the last save."""

    done: bool  # nothing is under way any more
    fault: str = ""  # why it came to nothing


class Worker:
    def __init__(self, ctx: RankContext, spec: WorkerSpec) -> None:
        self._ctx = ctx
        self._spec = spec
        self._before = _peak_bytes(ctx.device)
        transformers.utils.logging.disable_progress_bar()  # one bar a rank and a model would be drawn over the run's own view
        model = model_spec(spec.config, spec.folder, ctx.device)
        self._policy = self._backend(model, optim_spec(spec.config)) if "policy" in spec.plan.roles else None
        self._critic = self._start_critic(model) if "critic" in spec.plan.roles else None
        self._reference = self._backend(model, None) if "reference" in spec.plan.roles else None
        self._engine = self._begin_sampling(model) if "engine" in spec.plan.roles else None
        self._transport: Transport = plugins.load("sync", "inprocess")()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drumroll-commit")
        self._saving: Future[None] | None = None
        rng.seed(spec.config.seed + ctx.rank)

    def _backend(self, model: ModelSpec, optim: OptimSpec | None) -> Backend:
        section = self._spec.config.backend
        backend: Backend = plugins.load("backends", section.name)(plugins.options("backends", section))
        backend.setup(self._ctx, model, optim)
        return backend

    def _start_critic(self, policy: ModelSpec) -> Backend:
        assert self._spec.critic is not None, "a plan with a critic, and nothing that it begins as"
        return self._backend(critic_spec(policy, self._spec.critic), optim_spec(self._spec.config))

    def _begin_sampling(self, model: ModelSpec) -> Engine:
        """The engine, asleep where it takes turns: one that makes its cache at once has the learners' memory for it."""
        if not self._spec.config.runtime.take_turns or self._policy is None:
            return self._start_engine(model)
        with self._learners_aside():
            engine = self._start_engine(model)
            engine.sleep()
        return engine

    def _start_engine(self, model: ModelSpec) -> Engine:
        config = self._spec.config
        assert config.engine is not None
        engine: Engine = plugins.load("engines", config.engine.name)(plugins.options("engines", config.engine))
        engine.start(
            EngineSpec(
                path=model.path,
                dtype=model.compute_dtype,
                device=self._ctx.device,
                seed=config.seed,
                max_length=config.max_length,
                trust_remote_code=model.trust_remote_code,
                lora=model.lora,
            )
        )
        return engine

    @property
    def _trainer(self) -> Backend:
        assert self._policy is not None, "this run has no policy"
        return self._policy

    @property
    def _sampler(self) -> Engine:
        assert self._engine is not None, "this run has no engine"
        return self._engine

    @property
    def _valuer(self) -> Backend:
        assert self._critic is not None, "this run has no critic"
        return self._critic

    @property
    def _learners(self) -> list[Backend]:
        """Whatever trains."""
        return [role for role in (self._policy, self._critic) if role is not None]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """All completions of this rank's requests. With `runtime.take_turns` the device memory of policy and critic is free meanwhile."""
        if not self._spec.config.runtime.take_turns or self._policy is None:
            return list(self._sampler.generate(requests))
        with self._learners_aside():
            self._sampler.wake()
            try:
                return list(self._sampler.generate(requests))
            finally:
                self._sampler.sleep()

    @contextmanager
    def _learners_aside(self) -> Iterator[None]:
        """Within, the device memory of policy and critic is free."""
        for learner in self._learners:
            learner.sleep(KINDS)
        try:
            yield
        finally:
            for learner in self._learners:
                learner.wake()

    def logprobs(self, micros: Sequence[Sequence[TrainSample]]) -> list[list[np.ndarray]]:
        """The policy's log-probs of each target, float32 [N] a sample, in the order given."""
        return self._each(partial(_logprobs, self._trainer), micros)

    def reference_logprobs(self, micros: Sequence[Sequence[TrainSample]]) -> list[list[np.ndarray]]:
        """As `logprobs`, of the model that training began with."""
        if self._reference is not None:
            return self._each(partial(_logprobs, self._reference), micros)
        with self._trainer.reference():
            return self._each(partial(_logprobs, self._trainer), micros)

    def values(self, micros: Sequence[Sequence[TrainSample]]) -> list[list[np.ndarray]]:
        """As `logprobs`, the critic's value of the state before each target."""
        return self._each(self._valuer.values, micros)

    def _each(self, score: Callable[[MicroBatch], torch.Tensor], micros: Sequence[Sequence[TrainSample]]) -> list[list[np.ndarray]]:
        scores: list[list[np.ndarray]] = []
        for samples in micros:
            flat = score(collate(samples, self._ctx.device)).cpu().numpy()
            ends = np.cumsum([sample.n_targets for sample in samples])[:-1]
            scores.append(np.split(flat, ends) if samples else [])
        return scores

    def train(
        self, role: Trained, micros: Sequence[Sequence[TrainSample]], loss: LossFn, denominators: Denominators, lr: float
    ) -> TrainReport:
        """One optimizer step of policy or critic over this rank's micro-batches."""
        learner = self._trainer if role == "policy" else self._valuer
        stats: dict[str, Stat] = {}
        for index, samples in enumerate(micros):
            last = index == len(micros) - 1
            for name, stat in learner.forward_backward(collate(samples, self._ctx.device), loss, denominators, last).items():
                stats[name] = stats[name].merge(stat) if name in stats else stat
        return TrainReport(learner.step(lr), stats)

    def push(self, version: int) -> PushReport:
        """Send the policy's weights to the engine, and compare digests."""
        self._sampler.wake()
        dtype = model_spec(self._spec.config, self._spec.folder, self._ctx.device).compute_dtype
        return self._transport.push(self._trainer, self._sampler, dtype, version)

    def digests(self) -> dict[str, int]:
        """Name -> digest of every weight as it is stored, adapters apart, a critic's below `critic.`: nothing is gathered."""
        digests = self._trainer.digests(torch.float32, apart=True)
        if self._critic is not None:
            digests |= {f"critic.{name}": value for name, value in self._critic.digests(torch.float32).items()}
        return digests

    def save(self, store: CheckpointStore, draft: Checkpoint, background: bool) -> None:
        """Write this rank's part of a draft; rank 0 makes it a checkpoint when everybody's is there. No other is under way.

        A disk that refuses fails the save, not the rank: `saved` tells.
        """
        commit = partial(store.commit, draft) if self._ctx.rank == 0 else None
        folders = [(self._trainer, draft.tensors)] + ([(self._critic, draft.critic)] if self._critic is not None else [])
        written = [
            learner.save_async(folder) if background else _at_once(partial(learner.save, folder)) for learner, folder in folders
        ]
        self._saving = self._thread.submit(_commit, written, commit)

    def saved(self) -> SaveReport:
        """What has become of the last save."""
        if self._saving is None:
            return SaveReport(done=True)
        if not self._saving.done():
            return SaveReport(done=False)
        error = self._saving.exception()
        if error is not None and not isinstance(error, RunError):
            raise error
        return SaveReport(done=True, fault=str(error) if error is not None else "")

    def generators(self) -> rng.Generators:
        """This rank's random number generators as they are now."""
        return rng.capture()

    def load(self, checkpoint: Checkpoint, generators: bool) -> None:
        """Parameters and optimizer state of policy and critic; `generators`: this rank's random number generators too."""
        self._trainer.load(checkpoint.tensors)
        if self._critic is not None:
            self._critic.load(checkpoint.critic)
        if generators:
            file = checkpoint.generators(self._ctx.rank)
            rng.restore(rng.read(file), str(file))

    def export(self, out: Path, dtype: torch.dtype, shard_bytes: int) -> None:
        """Write the policy as a HF folder; rank 0 writes, all ranks take part in gathering bucket by bucket."""
        buckets = self._trainer.weights(dtype)
        if self._ctx.rank == 0:
            save_folder(self._spec.folder, out, buckets, shard_bytes)
        else:
            for _ in buckets:
                pass

    def export_adapter(self, out: Path) -> None:
        """Write the policy's adapters as a PEFT folder; rank 0 writes, all ranks take part in gathering."""
        lora = model_spec(self._spec.config, self._spec.folder, self._ctx.device).lora
        assert lora is not None, "this run has no adapters"
        buckets = self._trainer.weights(torch.float32, trained_only=True, apart=True)
        if self._ctx.rank == 0:
            save_adapter(self._spec.folder, out, lora, (named for bucket in buckets for named in bucket))
        else:
            for _ in buckets:
                pass

    def memory(self) -> dict[str, int]:
        """Bytes held on this rank by kind, and `peak`: the most this process has held; `process`: what that was before any model.

        The peak is device memory on a GPU and resident memory on a CPU.
        """
        held = dict(self._policy.memory()) if self._policy is not None else {}
        if self._engine is not None:
            held["engine"] = self._engine.memory()
        if self._critic is not None:
            memory = self._critic.memory()
            held["critic"] = sum(memory[kind] for kind in KINDS)
        if self._reference is not None:
            held["reference"] = sum(self._reference.memory().values())
        held["peak"] = _peak_bytes(self._ctx.device)
        held["process"] = self._before
        return held

    def close(self) -> None:
        """Finish a save under way, release everything."""
        self._thread.shutdown()
        for role in (self._engine, self._policy, self._critic, self._reference):
            if role is not None:
                role.close()


def _logprobs(backend: Backend, micro: MicroBatch) -> torch.Tensor:
    found = backend.logprobs(micro).logprobs
    assert found is not None  # of a language-model head
    return found


def _at_once(write: Callable[[], None]) -> Future[None]:
    """A write that training waits for, as one in the background is seen."""
    written: Future[None] = Future()
    try:
        write()
        written.set_result(None)
    except RunError as error:
        written.set_exception(error)
    return written


def _commit(written: Sequence[Future[None]], commit: Callable[[], Path] | None) -> None:
    """On a thread: when all ranks have written everything, rank 0 has something to do."""
    wait(written)  # all of them, also where one has failed: what there is of it is removed then, and nobody may be writing there
    for one in written:
        one.result()
    if commit is not None:
        commit()


def model_spec(config: RunConfig, folder: Path, device: torch.device) -> ModelSpec:
    """How policy and reference compute."""
    return replace(
        spec_of(config.model, folder, device, config.seed),
        temperature=config.rollout.temperature if config.pipeline == "rl" else 1.0,
        balance=config.train.router_aux_coef > 0,
    )


def spec_of(model: ModelConfig, folder: Path, device: torch.device, seed: int = 0) -> ModelSpec:
    """What a recipe's section `model` alone says; `auto` is bfloat16 on a GPU and float32 on a CPU. `seed`: of the run."""
    if model.dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    else:
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    return ModelSpec(
        path=str(folder),
        compute_dtype=dtype,
        trainable=model.trainable,
        lora=lora_spec(model.lora, seed) if model.lora is not None else None,
        layout=model.layout,
        attention=model.attention,
        checkpointing=model.checkpointing,
        compile=model.compile,
        share_prompts=model.share_prompts,
        tile_mlp=model.tile_mlp,
        trust_remote_code=model.trust_remote_code,
    )


def critic_spec(policy: ModelSpec, start: CriticStart) -> ModelSpec:
    """How a critic computes: as the policy does, but for its head and what trains."""
    return replace(policy, path=str(start.folder), head="value", trainable=start.trainable, lora=None, balance=False)


def lora_spec(lora: LoraConfig, seed: int) -> LoraSpec:
    """`seed`: of the run."""
    return LoraSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=() if lora.targets == "all-linear" else lora.targets,
        base_dtype=torch.bfloat16 if lora.base_dtype == "bfloat16" else torch.float32,
        seed=seed,
        start=lora.start,
    )


def optim_spec(config: RunConfig) -> OptimSpec:
    """The optimizer of `optim`, without its schedule: the learning rate comes with each step."""
    optim = config.optim
    return OptimSpec(
        name=optim.name,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        offload=optim.offload,
        max_grad_norm=optim.max_grad_norm,
    )


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
