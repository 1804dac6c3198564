"""From a run's config to its forecast: which micro-batch is the largest, what every rank holds in each phase, what a step sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from drumroll import plugins
from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.backends.base import ModelSpec, OptimSpec, RankContext
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint
from drumroll.config import RunConfig
from drumroll.engines.base import Demand, Foreseen, Holding
from drumroll.errors import UserError
from drumroll.models.experts import expert_modules
from drumroll.models.scorer import Scorer
from drumroll.planner import state as states
from drumroll.planner.phases import CRITIC, POLICY, Phase, Scene, gathered_elements, phases
from drumroll.planner.source import config_folder
from drumroll.planner.trace import Batch, Trace, build_fake, trace
from drumroll.planner.traffic import Traffic, traffic
from drumroll.runtime import plan as roles
from drumroll.runtime.worker import CriticStart, critic_spec, model_spec, optim_spec


@dataclass(slots=True, frozen=True)
class Work:
    """What a rank does in a step, at most: every prompt and response is taken to be as long as the config allows."""

    batch: Batch
    micros: int  # micro-batches an optimizer step
    optimizer_steps: int
    scored: int  # micro-batches that the policy, or a reference, scores without a gradient
    passes: int  # micro-batches of the whole batch
    in_flight: int  # rows that the engine is asked for at a time


@dataclass(slots=True, frozen=True)
class Forecast:
    """The fullest rank of a run on `ranks` ranks."""

    ranks: int
    backend: str
    device: str
    parameters: int  # of the model, tied ones once
    state: states.State  # at rest
    work: Work
    phases: list[Phase]
    traffic: list[Traffic]
    notes: list[str]  # what could not be foreseen
    critic: states.State | None = None  # at rest, of a run that has one
    host: int = 0  # bytes in host memory beside what the device has

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def between(self) -> int:
        """Bytes of parameters, gradients and optimizer state between steps, wherever they lie: the policy's, and a critic's."""
        return self.state.between + (self.critic.between if self.critic is not None else 0)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def training_scene(
    spec: ModelSpec, optim: OptimSpec | None, footprint: Footprint, batch: Batch, micros: int, device: torch.device
) -> Scene:
    """A policy alone on its ranks: no engine, no reference. Reads the config.json of `spec.path`, no weights."""
    _, scorer = _built(spec)
    tensors = states.parameters(scorer, footprint, adapted=spec.lora is not None)
    return Scene(
        device=device,
        footprint=footprint,
        tensors=tensors,
        dtype=spec.compute_dtype,
        state=states.state(tensors, footprint, optim),
        buffers=sum(buffer.nbytes for buffer in scorer.buffers()),
        trace=_traced(spec, batch, device, footprint.gathering is None, footprint.experts),
        micros=micros,
        unit_elements=gathered_elements(tensors, footprint),
        travelling=_travelling(scorer, batch, footprint.experts) * spec.compute_dtype.itemsize,
        recomputed=spec.checkpointing != "none",
    )


def _travelling(scorer: Scorer, batch: Batch, expert_ranks: int) -> int:
    """Numbers that a rank sends for one pass of a micro-batch through experts on other ranks, to them and back."""
    if expert_ranks == 1:
        return 0
    config = scorer.hf.config.get_text_config()
    rows = batch.tokens * int(config.num_experts_per_tok) * len(expert_modules(scorer.hf))
    return 2 * rows * int(config.hidden_size) * (expert_ranks - 1) // expert_ranks


def forecast(config: RunConfig, folder: Path) -> Forecast:
    """`folder`: one with the model's config.json; weights are not read. Raises UserError for a backend that says nothing of its memory."""
    device = torch.device(_device(config))
    ranks = config.runtime.ranks
    footprint = _footprint(config, ranks)
    spec = model_spec(config, folder, device)
    algorithm = resolve(config.algorithm, config.rollout.max_tokens) if config.algorithm is not None else None
    placed = roles.plan(config, algorithm is not None and algorithm.needs_reference, algorithm is not None and algorithm.needs_critic).roles
    work = _work(config, algorithm, ranks, footprint.sequence)
    notes = ["model.compile keeps fewer activations than are foreseen here"] if spec.compile else []
    alone = training_scene(spec, optim_spec(config), footprint, work.batch, work.micros, device)
    scene = replace(
        alone,
        reference=states.state(alone.tensors, footprint, None).parameter if "reference" in placed else 0,
        engine=_holding(config, folder, spec, alone.tensors, work, notes) if "engine" in placed else None,
        take_turns=config.runtime.take_turns,
        checkpoints=config.checkpoint.every > 0,
        background=config.checkpoint.async_save,
    )
    critic = None
    if algorithm is not None and "critic" in placed:
        start = CriticStart(folder if algorithm.critic.path is None else config_folder(algorithm.critic.path), algorithm.critic.trainable)
        learner = training_scene(critic_spec(spec, start), optim_spec(config), footprint, work.batch, work.micros, device)
        trained = replace(learner, checkpoints=scene.checkpoints, background=scene.background)
        critic = replace(trained, reference=scene.reference, engine=scene.engine, take_turns=scene.take_turns, beside=scene.aside(POLICY))
        scene = replace(scene, beside=trained.aside(CRITIC))
    return Forecast(
        ranks=ranks,
        backend=config.backend.name,
        device=device.type,
        parameters=states.count(scene.tensors),
        state=scene.state,
        work=work,
        phases=phases(scene, critic),
        traffic=[*traffic(scene, ranks, optimizer_steps=work.optimizer_steps, scored=work.scored), *_traffic_of(critic, work, ranks)],
        notes=notes,
        critic=critic.state if critic is not None else None,
        host=sum(one.state.host for one in (scene, critic) if one is not None) + (scene.copies if device.type != "cpu" else 0),
    )


def _traffic_of(critic: Scene | None, work: Work, ranks: int) -> list[Traffic]:
    """Of the critic: it values every micro-batch once, trains on it as the policy does, and sends nothing to the engine."""
    if critic is None:
        return []
    found = traffic(replace(critic, engine=None), ranks, optimizer_steps=work.optimizer_steps, scored=work.passes)
    return [replace(one, what=f"{CRITIC}: {one.what}") for one in found]


def _device(config: RunConfig) -> str:
    if config.runtime.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.runtime.device


def _footprint(config: RunConfig, ranks: int) -> Footprint:
    plugin = plugins.load("backends", config.backend.name)
    if not isinstance(plugin, TorchPlugin) or plugin.footprint is None:
        raise UserError(
            f"backend.name={config.backend.name} does not say how it divides memory, so nothing can be foreseen: "
            "give its TorchPlugin a footprint (drumroll/backends/footprint.py)"
        )
    options = plugins.options("backends", config.backend)
    plugin.placement(options).check(RankContext(rank=0, world_size=ranks, device=torch.device(_device(config))))
    return plugin.footprint(options, ranks)


def _work(config: RunConfig, algorithm: Algorithm | None, ranks: int, sharing: int) -> Work:
    """`sharing`: ranks that cut every sequence among them."""
    length = -(-config.max_length // sharing)
    fitting = max(1, config.train.micro_batch_tokens // length)
    if algorithm is None:
        samples, steps, targets, in_flight = config.train.batch_size, 1, length - 1, 0
    else:
        rollouts = config.rollout.prompts_per_step * algorithm.group_size
        minibatches = min(algorithm.minibatches, config.rollout.prompts_per_step)
        samples, steps = -(-rollouts // minibatches), minibatches * algorithm.epochs
        targets = -(-config.rollout.max_tokens // sharing)
        evaluated = config.eval.rows if config.data.eval is not None else 0
        in_flight = max(-(-config.rollout.prompts_per_step // ranks) * algorithm.group_size, -(-evaluated // ranks))
    of_rank = -(-samples // ranks)
    rows = min(fitting, of_rank)
    passes = 0 if algorithm is None else int(algorithm.needs_old_logprobs) + int(algorithm.needs_reference)
    all_samples = of_rank * (1 if algorithm is None else minibatches)
    return Work(
        batch=Batch(rows, length, min(targets, length - 1)),
        micros=-(-of_rank // rows),
        optimizer_steps=steps,
        scored=passes * -(-all_samples // rows),
        passes=-(-all_samples // rows),
        in_flight=in_flight,
    )


@lru_cache(maxsize=8)
def _built(spec: ModelSpec) -> tuple[FakeTensorMode, Scorer]:
    return build_fake(spec)


@lru_cache(maxsize=32)
def _traced(spec: ModelSpec, batch: Batch, device: torch.device, cast: bool, expert_ranks: int) -> Trace:
    """A model of its own: tracing may leave it in another dtype."""
    mode, scorer = build_fake(spec, expert_ranks)
    try:
        return trace(mode, scorer, batch, device, cast=cast)
    except Exception as error:  # fault boundary: the model's own code, which may ask for values that fake tensors do not have
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"model {spec.path}: a micro-batch cannot be followed without values: {type(error).__name__}: {said}") from error


def _holding(
    config: RunConfig, folder: Path, spec: ModelSpec, tensors: Sequence[states.Stored], work: Work, notes: list[str]
) -> Holding | None:
    assert config.engine is not None
    plugin = plugins.load("engines", config.engine.name)
    if not isinstance(plugin, Foreseen):
        notes.append(f"engine.name={config.engine.name} does not say how much memory it takes: it is left out")
        return None
    demand = Demand(
        config=AutoConfig.from_pretrained(folder, trust_remote_code=spec.trust_remote_code),
        parameters=states.count(tensors),
        dtype=spec.compute_dtype,
        rows=work.in_flight,
        prompt=config.data.max_prompt_tokens,
        length=config.max_length,
    )
    return plugin.foresee(plugins.options("engines", config.engine), demand)
