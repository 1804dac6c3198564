"""The critic of an actor-critic, as the driver sees it: values of samples, and optimizer steps of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumroll.algorithms.presets import CriticSettings
from drumroll.config import RunConfig
from drumroll.runtime.learner import Learner
from drumroll.runtime.local import Ranks
from drumroll.runtime.worker import Worker
from drumroll.types import LossFn, StepStats, TrainSample


class Critic:
    """A value model on the policy's ranks, with an optimizer of its own. Where its parameters are saved and restored: `Policy`."""

    def __init__(self, ranks: Ranks[Worker], config: RunConfig, settings: CriticSettings, total_steps: int) -> None:
        optim = config.optim.model_copy(update={"lr": settings.lr})
        self._learner = Learner(ranks, config, "critic", optim, total_steps)

    @property
    def applied_steps(self) -> int:
        return self._learner.applied_steps

    @property
    def skips_in_a_row(self) -> int:
        return self._learner.skips_in_a_row

    @property
    def next_learning_rate(self) -> float:
        return self._learner.next_learning_rate

    def values(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """The value of the state before each target: float32 [N] a sample, in the order given."""
        return self._learner.scores(Worker.values, samples)

    def step(self, samples: Sequence[TrainSample], loss: LossFn) -> StepStats:
        """One optimizer step on `samples`. Raises RunError after `optim.max_skips` non-finite steps in a row."""
        return self._learner.step(samples, loss)

    def stand_at(self, applied_steps: int, skips_in_a_row: int) -> None:
        """Go on where a saved critic stood."""
        self._learner.applied_steps, self._learner.skips_in_a_row = applied_steps, skips_in_a_row
