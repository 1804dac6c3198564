"""What distribution costs: tokens a second of every backend on 2 ranks, against twice `single` and against a bare `fully_shard` loop.

    python benchmarks/backends.py

Weak scaling: every rank trains the same number of samples a step, so 2 ranks should do twice what one does. All samples have 96 tokens,
so that padding plays no part; a step has two micro-batches a rank, because only then does it matter after which of them gradients are
reduced. Every rank is a process on one thread. Backends run in two casts, so that their memory fits, each beside a `single` of its own;
all groups of a cast are started first and step in turn. `bare fully_shard` is the same model and optimizer in the shortest loop that
trains it, full logits, nothing reported: what fsdp2 takes longer than that is the framework's share.

Share of the matmul peak: FLOPs of the step (6 a parameter and token, embedding left out, and causal attention) over its time by the clock,
over the ranks times the rate of a 1024^3 fp32 matrix product of one core, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import common
import numpy as np
import torch
from sides import Measure, Stopwatch, Summary
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_step import flops
from transformers import AutoConfig, AutoModelForCausalLM

from drumroll import packing, plugins
from drumroll.algorithms.presets import resolve
from drumroll.backends.base import Backend, ModelSpec, OptimSpec, RankContext
from drumroll.config import AlgorithmConfig, KLConfig
from drumroll.models.locate import locate
from drumroll.observe.checks import CheckRow, at_least, at_most, measured
from drumroll.runtime.local import launch
from drumroll.runtime.ranks import Ranks
from drumroll.types import TrainSample

TOKENS, ROWS, MICROS = 96, 8, 2  # of a sample, samples of a micro-batch, micro-batches of a rank and step
LR, MAX_NORM = 1e-6, 1.0
MODELS = ("llama-4.5m", "llama-24m")
_MIB = 1 << 20


class Trainee(Protocol):
    def step(self, turn: int) -> None:
        """Train one step."""

    def close(self) -> None: ...


@dataclass(slots=True, frozen=True)
class Subject:
    """What is measured: a backend with its options, or the bare loop."""

    name: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    bare: bool = False

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


SINGLE = Subject(plugins.SPECIFICATION_BACKEND, 1)
DDP = Subject("ddp", 2)
FSDP2 = Subject("fsdp2", 2)
FASTEST = Subject("fsdp2", 2, {"reshard_after_forward": False, "grad_sync": "last"})
BARE = Subject("bare fully_shard", 2, bare=True)
CASTS = (
    (SINGLE, DDP, FSDP2, Subject("fsdp2", 2, {"reshard_after_forward": False}), Subject("fsdp2", 2, {"grad_sync": "last"}), FASTEST, BARE),
    (SINGLE, Subject("zero1", 2), Subject("zero2", 2), Subject("fsdp1", 2)),
)
OF_DDP, OVER_BARE = {"llama-24m": 0.9}, 1.05  # targets; small models have less to compute while they communicate


def samples(turn: int, rank: int) -> list[TrainSample]:
    """This rank's samples of a step: random tokens, the first 16 of them a prompt."""
    random = np.random.default_rng((turn, rank))
    mask = np.arange(TOKENS) >= 16
    return [
        TrainSample(
            token_ids=random.integers(4, 66, TOKENS, dtype=np.int64),
            target_mask=mask,
            advantages=np.full(int(mask.sum()), random.normal(), dtype=np.float32),
            group_id=index // 8,
            index=index % 8,
        )
        for index in range(ROWS * MICROS)
    ]


class OfBackend:
    """One rank of a drumroll backend."""

    def __init__(self, ctx: RankContext, subject: Subject, folder: Path) -> None:
        plugin = plugins.load("backends", subject.name)
        self._ctx = ctx
        self._backend: Backend = plugin(plugin.Config(**subject.options))
        self._backend.setup(ctx, ModelSpec(path=str(folder)), OptimSpec(max_grad_norm=MAX_NORM))
        self._loss = resolve(AlgorithmConfig(name="grpo", kl=KLConfig(coef=0.0)), TOKENS).loss()

    def step(self, turn: int) -> None:
        everybody = [sample for rank in range(self._ctx.world_size) for sample in samples(turn, rank)]
        total = packing.denominators(everybody)
        mine = samples(turn, self._ctx.rank)
        for micro in range(MICROS):
            batch = packing.collate(mine[micro * ROWS : (micro + 1) * ROWS])
            self._backend.forward_backward(batch, self._loss, total, micro == MICROS - 1)
        self._backend.step(LR)

    def close(self) -> None:
        self._backend.close()


class Bare:
    """One rank of a loop over `fully_shard`, nothing else."""

    def __init__(self, ctx: RankContext, folder: Path) -> None:
        self._ctx = ctx
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (ctx.world_size,))
        for block in self._model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self, turn: int) -> None:
        mine = samples(turn, self._ctx.rank)
        for micro in range(MICROS):
            batch = mine[micro * ROWS : (micro + 1) * ROWS]
            ids = torch.from_numpy(np.stack([s.token_ids for s in batch]))
            targets = torch.from_numpy(np.stack([s.target_mask for s in batch]))[:, 1:]
            weights = torch.tensor([float(s.advantages[0]) for s in batch if s.advantages is not None])[:, None]
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(logprobs * weights * targets).sum() / (MICROS * targets.sum())).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        del self._model, self._optimizer


def take_step(trainee: Trainee, turn: int) -> Measure:
    """On every rank: its own clock, its own processor seconds."""
    watch = Stopwatch()
    trainee.step(turn)
    return watch.measure(TOKENS * ROWS * MICROS)


def together(measures: Sequence[Measure]) -> Measure:
    """A step of all ranks: as long as the slowest, processor seconds and tokens added up, memory of the fullest."""
    return Measure(
        seconds=max(m.seconds for m in measures),
        cpu_seconds=sum(m.cpu_seconds for m in measures),
        tokens=sum(m.tokens for m in measures),
        peak_bytes=max(m.peak_bytes for m in measures),
    )


def start(subject: Subject, folder: Path) -> Ranks[Trainee]:
    factory: Any = partial(Bare, folder=folder) if subject.bare else partial(OfBackend, subject=subject, folder=folder)
    return launch(factory, subject.ranks, device="cpu", in_process=False)


def measure(model: str, rounds: int, peak: float) -> list[CheckRow]:
    """All subjects on one model, those of a cast in turn; medians. `peak`: FLOP/s of a core."""
    folder = locate(f"builtin:{model}")
    config, parameters = AutoConfig.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    work = flops(samples(0, 0), config, parameters)
    found: list[CheckRow] = []
    for subjects in CASTS:
        summaries = in_turn(subjects, folder, rounds)
        single = summaries[SINGLE.label]
        found += [row for subject in subjects for row in rows(model, subject, summaries[subject.label], single, work / peak)]
        if BARE in subjects:
            found += ratios(model, summaries)
    return found


def in_turn(subjects: Sequence[Subject], folder: Path, rounds: int) -> dict[str, Summary]:
    """Label -> what was measured."""
    measures: dict[str, list[Measure]] = {subject.label: [] for subject in subjects}
    with ExitStack() as stack:
        groups = [stack.enter_context(start(subject, folder)) for subject in subjects]
        for turn in range(rounds + 1):
            for ranks, found in zip(groups, measures.values(), strict=True):
                found.append(together(ranks.call(take_step, turn)))
    return {label: Summary.of(found[1:]) for label, found in measures.items()}


def rows(model: str, subject: Subject, summary: Summary, single: Summary, seconds_at_peak: float) -> list[CheckRow]:
    """`seconds_at_peak`: of a rank's step, were it matrix products alone."""
    row = partial(measured, backend=subject.name, options={"model": model, **subject.options}, ranks=subject.ranks)
    found = [row("tokens a second", summary.tokens_per_second)]
    if subject.ranks > 1:
        found.append(row("of twice single", summary.tokens_per_second / (subject.ranks * single.tokens_per_second)))
    return [
        *found,
        row("share of the matmul peak", seconds_at_peak / summary.seconds),
        row("processor seconds a step, all ranks", summary.cpu_seconds),
        row("peak memory a rank, MiB", summary.peak_bytes / _MIB),
    ]


def ratios(model: str, summaries: Mapping[str, Summary]) -> list[CheckRow]:
    """fsdp2 against the loop that it is made of, and at its fastest against what sends least."""
    fsdp2, fastest, ddp, bare = (summaries[subject.label] for subject in (FSDP2, FASTEST, DDP, BARE))
    over_bare: dict[str, Any] = {"backend": FSDP2.name, "options": {"model": model, "against": BARE.name}, "ranks": FSDP2.ranks}
    of_ddp = over_bare | {"options": {"model": model, "against": DDP.name, **FASTEST.options}}
    share = ddp.seconds / fastest.seconds
    return [
        at_most("time, ratio", fsdp2.seconds / bare.seconds, OVER_BARE, **over_bare),
        measured("processor time, ratio", fsdp2.cpu_seconds / bare.cpu_seconds, **over_bare),
        at_least("speed, ratio", share, OF_DDP[model], **of_ddp) if model in OF_DDP else measured("speed, ratio", share, **of_ddp),
        measured("speed by processor time, ratio", ddp.cpu_seconds / fastest.cpu_seconds, **of_ddp),
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="steps of each that count, after one that does not")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this model")
    options = parser.parse_args()
    common.announce()
    peak = common.matmul_rate()
    found = [measured("fp32 matmul rate of one core, GFLOP/s", peak / 1e9, backend="none")]
    found += [row for model in options.model or MODELS for row in measure(model, options.rounds, peak)]
    common.report(found, f"Backends, {options.rounds} steps in turn, medians", options.json)


if __name__ == "__main__":
    main()
