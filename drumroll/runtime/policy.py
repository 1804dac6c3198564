"""The policy across all ranks, as the driver sees it: score samples, take one optimizer step, send the weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from drumroll.algorithms.loss import balanced
from drumroll.checkpoint.driver import DriverState
from drumroll.checkpoint.rng import Generators
from drumroll.checkpoint.store import CannotWrite, Checkpoint, CheckpointStore
from drumroll.config import RunConfig
from drumroll.engines.base import Completion, GenerateRequest
from drumroll.engines.router import route
from drumroll.errors import RunError
from drumroll.runtime.learner import Learner, Score
from drumroll.runtime.ranks import Ranks
from drumroll.runtime.worker import Scored, Worker
from drumroll.sync.base import PushReport
from drumroll.types import LossFn, StepStats, TrainSample

_SCORES: dict[Scored, Score] = {"policy": Worker.logprobs, "reference": Worker.reference_logprobs}


class Policy:
    """What a run trains, and a critic beside it where there is one: they are saved and restored together."""

    def __init__(self, ranks: Ranks[Worker], config: RunConfig, total_steps: int, critic: Learner | None = None) -> None:
        """`total_steps`: optimizer steps of the policy in the whole run."""
        self._ranks = ranks
        self._config = config
        self._learner = Learner(ranks, config, "policy", config.optim, total_steps)
        self.critic = critic
        self.version = -1  # of the weights; nothing sent yet

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Completions of all requests, in no particular order. Raises RunError naming the rank whose engine loses one."""
        shares = route(requests, self._ranks.world_size)
        answers = self._ranks.scatter(Worker.generate, [(share,) for share in shares])
        for rank, (share, completions) in enumerate(zip(shares, answers, strict=True)):
            _check_complete(rank, share, completions)
        return [completion for completions in answers for completion in completions]

    def logprobs(self, role: Scored, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs of every sample's targets under the policy or the reference: float32 [N] a sample, in the order given."""
        return self._learner.scores(_SCORES[role], samples)

    def step(self, samples: Sequence[TrainSample], loss: LossFn) -> StepStats:
        """One optimizer step on `samples`. Raises RunError after `optim.max_skips` non-finite steps in a row."""
        if self._config.train.router_aux_coef:
            loss = partial(balanced, loss=loss, coef=self._config.train.router_aux_coef)
        return self._learner.step(samples, loss)

    @property
    def applied_steps(self) -> int:
        return self._learner.applied_steps

    @property
    def skips_in_a_row(self) -> int:
        return self._learner.skips_in_a_row

    @property
    def next_learning_rate(self) -> float:
        return self._learner.next_learning_rate

    def push(self) -> PushReport:
        """Send the weights to every engine as the next version; all digests are compared on all ranks."""
        self.version += 1
        return self._ranks.call(Worker.push, self.version)[0]

    def digests(self) -> dict[str, int]:
        """Name -> digest of every weight, those of a critic below `critic.`. Raises RunError when two ranks disagree about one."""
        first, *others = self._ranks.call(Worker.digests)
        for rank, other in enumerate(others, 1):
            if wrong := [name for name in first if other.get(name) != first[name]]:
                raise RunError(f"ranks 0 and {rank} hold different weights: {', '.join(wrong[:3])} ({len(wrong)} of {len(first)})")
        return first

    def export(self, out: Path, dtype: torch.dtype = torch.float32, shard_bytes: int = 4 << 30) -> None:
        """Write a HF model folder, in files of at most `shard_bytes` of tensors."""
        self._ranks.call(Worker.export, out, dtype, shard_bytes)

    def export_adapter(self, out: Path) -> None:
        """Write the adapters of a run that has some, for PEFT."""
        self._ranks.call(Worker.export_adapter, out)

    def generators(self) -> list[Generators]:
        """The random number generators of every rank as they are now."""
        return self._ranks.call(Worker.generators)

    def save(self, store: CheckpointStore, draft: Checkpoint, background: bool) -> None:
        """Have the ranks write their parts of a draft and make it a checkpoint; `saved` tells what came of it."""
        self._ranks.call(Worker.save, store, draft, background)

    def saved(self) -> bool:
        """Whether no save is under way on any rank. Raises CannotWrite for one that has come to nothing."""
        reports = self._ranks.call(Worker.saved)
        done = all(report.done for report in reports)
        if done and (faults := [report.fault for report in reports if report.fault]):
            raise CannotWrite(faults[0])  # of several: they wrote together, and all of them say what failed first
        return done

    def restore(self, checkpoint: Checkpoint, state: DriverState, generators: bool) -> None:
        """Stand where the policy stood that was saved; the next push sends its weights again, as the version that they were.

        `generators`: the ranks' random number generators too; only on as many ranks as saved them.
        """
        self._ranks.call(Worker.load, checkpoint, generators)
        self._learner.stand_at(state.applied_steps, state.skips_in_a_row)
        if self.critic is not None:
            self.critic.stand_at(state.critic_applied_steps, state.critic_skips_in_a_row)
        self.version = max(-1, state.version - 1)

    def memory(self) -> list[dict[str, int]]:
        """Bytes by kind, one entry a rank."""
        return self._ranks.call(Worker.memory)


def _check_complete(rank: int, requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> None:
    wanted = [(request.group_id, index) for request in requests for index in range(request.n)]
    got = [(one.group_id, one.index) for one in completions]
    if sorted(wanted) != sorted(got):
        lost = sorted(set(wanted) - set(got))
        first = f"first lost (group, sample): {lost[:3]}" if lost else "some were not asked for, or came twice"
        raise RunError(f"rank {rank}: its engine returned {len(got)} completions for {len(wanted)} samples; {first}")
