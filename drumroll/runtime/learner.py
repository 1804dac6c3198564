"""A role that trains, across all ranks, as the driver sees it: samples are packed on ranks, scored there, and trained a step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from drumroll.algorithms.presets import CriticSettings
from drumroll.algorithms.schedule import learning_rate
from drumroll.config import OptimConfig, RunConfig
from drumroll.errors import RunError
from drumroll.packing import SharesMicroBatches, denominators, pack
from drumroll.plugins import options
from drumroll.runtime.ranks import Ranks
from drumroll.runtime.worker import Trained, TrainReport, Worker
from drumroll.types import LossFn, Stat, StepStats, TrainSample

# What a rank does with its micro-batches: float32 [N] a sample, in the order given.
Score = Callable[[Worker, Sequence[Sequence[TrainSample]]], list[list[np.ndarray]]]
_RATE: dict[Trained, Literal["optim.lr", "algorithm.critic.lr"]] = {"policy": "optim.lr", "critic": "algorithm.critic.lr"}


class Learner:
    """Driver state that decides numbers lives here: applied steps (the learning rate), and skips in a row."""

    def __init__(self, ranks: Ranks[Worker], config: RunConfig, role: Trained, optim: OptimConfig, total_steps: int) -> None:
        """`optim`: whose learning rate and schedule the role has; `total_steps`: its optimizer steps in the whole run."""
        self._ranks = ranks
        self._config = config
        self._role: Trained = role
        self._optim = optim
        self._total_steps = total_steps
        backend = options("backends", config.backend)
        self._sharing = backend.sequence_ranks if isinstance(backend, SharesMicroBatches) else 1  # ranks that share a micro-batch
        self.applied_steps = 0
        self.skips_in_a_row = 0

    @property
    def next_learning_rate(self) -> float:
        return learning_rate(self._optim, self.applied_steps, self._total_steps)

    def scores(self, score: Score, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """What `score` says of every sample's targets: float32 [N] a sample, in the order given."""
        packed = self._pack(samples)
        answers = self._ranks.scatter(score, [(self._pick(samples, micros),) for micros in packed])
        scores: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        for micros, scored in zip(packed, answers, strict=True):
            for indices, arrays in zip(micros, scored, strict=True):
                for index, array in zip(indices, arrays, strict=True):
                    scores[index] = array
        return scores

    def step(self, samples: Sequence[TrainSample], loss: LossFn) -> StepStats:
        """One optimizer step on `samples`. Raises RunError after `optim.max_skips` non-finite steps in a row."""
        total, rate = denominators(samples), self.next_learning_rate
        calls = [(self._role, self._pick(samples, micros), loss, total, rate) for micros in self._pack(samples)]
        merged = _merge(self._ranks.scatter(Worker.train, calls))
        if merged.skipped:
            self.skips_in_a_row += 1
            if self.skips_in_a_row >= self._config.optim.max_skips:
                raise RunError(
                    f"the {self._role}'s gradient norm was not finite in {self.skips_in_a_row} optimizer steps in a row (optim.max_skips): "
                    f"parameters are as they were before the first of them; {self._advice(merged)}"
                )
        else:
            self.applied_steps += 1
            self.skips_in_a_row = 0
        return merged

    def stand_at(self, applied_steps: int, skips_in_a_row: int) -> None:
        """Go on where a saved one stood; its parameters are the ranks' matter."""
        self.applied_steps, self.skips_in_a_row = applied_steps, skips_in_a_row

    def _advice(self, update: StepStats) -> str:
        """What to look at when step after step is skipped: where it stops being finite tells what it is."""
        loss, rate = update.stats["loss"].sum, _RATE[self._role]
        if math.isfinite(loss):
            return f"the loss is finite and its gradient is not: lower {rate}, or take model.dtype=float32"
        if self.applied_steps == 0:
            return f"the loss is {loss}, and not one step has been applied: look for NaN in the model it started from, then in the data"
        return f"the loss is {loss}: the {self._role} computes no finite numbers any more; lower {rate}, go on from an earlier checkpoint"

    def _pack(self, samples: Sequence[TrainSample]) -> list[list[list[int]]]:
        lengths, cap = [len(sample.token_ids) for sample in samples], self._config.train.micro_batch_tokens
        return pack(lengths, self._ranks.world_size, cap, self._sharing)

    @staticmethod
    def _pick(samples: Sequence[TrainSample], micros: Sequence[Sequence[int]]) -> list[list[TrainSample]]:
        return [[samples[index] for index in micro] for micro in micros]


def critic_learner(ranks: Ranks[Worker], config: RunConfig, settings: CriticSettings, total_steps: int) -> Learner:
    """A value model on the policy's ranks, with a learning rate of its own; what it scores are `Worker.values`."""
    return Learner(ranks, config, "critic", config.optim.model_copy(update={"lr": settings.lr}), total_steps)


def _merge(reports: Sequence[TrainReport]) -> StepStats:
    results = {(report.result.grad_norm, report.result.skipped) for report in reports if not report.result.skipped}
    skipped = any(report.result.skipped for report in reports)
    if (skipped and results) or len(results) > 1:
        raise RunError(f"ranks disagree about the step: {[report.result for report in reports]}")
    stats: dict[str, Stat] = {}
    for report in reports:
        for name, stat in report.stats.items():
            stats[name] = stats[name].merge(stat) if name in stats else stat
    return StepStats(grad_norm=reports[0].result.grad_norm, skipped=skipped, stats=stats)
