"""What the suite trains on: ragged samples, how they are split over ranks and micro-batches, and a loss that uses all that a loss may see.

Everything is a pure function of the step and the split, so that any number of ranks trains on the same samples as one process does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from drumroll.types import Denominators, LossOutput, MicroBatch, TokenOutputs, TrainSample

STEPS = 3
LEARNING_RATES = (1e-3, 3e-4, 2e-3)  # another one each step
SCALES = (1.0, 0.05, 2.0)  # of the loss: with the limit that the suite sets, the second step is not clipped and the others are

_COUNT = 9
_WITHOUT_TARGETS = 5  # index of a sample that carries no loss
_SHARING = {4: 0, 6: 2, 7: 1}  # samples that begin with the prompt of another: on 1 to 4 ranks one is with it in some micro-batch
POISON = 8  # index of the sample that a poisoned step makes NaN


@dataclass(slots=True, frozen=True)
class Split:
    """How the samples of a step lie on ranks and micro-batches."""

    name: str
    passes: int
    idle: bool = False  # the last rank has no sample; a single rank has an empty last micro-batch
    poisoned: bool = False  # the last rank has the poison sample alone, in its last micro-batch


SPLITS = (Split("1 micro-batch", 1), Split("2 micro-batches", 2), Split("4 micro-batches", 4), Split("an empty rank", 2, idle=True))
WHOLE = SPLITS[0]
POISONED = Split("one poisoned sample", 2, poisoned=True)


def plan(split: Split, rank: int, ranks: int) -> list[list[int]]:
    """Sample indices of each micro-batch of a rank. Every rank has the same number of micro-batches; some are empty."""
    if split.poisoned:
        return _poisoned_plan(split.passes, rank, ranks)
    workers = max(1, ranks - 1) if split.idle else ranks
    mine = list(range(_COUNT))[rank::workers] if rank < workers else []
    passes = split.passes - 1 if split.idle and ranks == 1 else split.passes
    return _cut(mine, passes) + [[]] * (split.passes - passes)


def _poisoned_plan(passes: int, rank: int, ranks: int) -> list[list[int]]:
    rest = [index for index in range(_COUNT) if index != POISON]
    if ranks == 1:
        return [*_cut(rest, passes - 1), [POISON]]
    if rank == ranks - 1:
        return [[]] * (passes - 1) + [[POISON]]
    return _cut(rest[rank :: ranks - 1], passes)


def _cut(indices: list[int], passes: int) -> list[list[int]]:
    size = -(-len(indices) // passes)
    return [indices[start * size : (start + 1) * size] for start in range(passes)]


def samples(step: int, vocab: int, poison: bool = False) -> list[TrainSample]:
    """Long and short ones by turns, so that ranks have very different numbers of targets; two make a group; some share a prompt.

    The poison sample's tokens are the first of the vocabulary only: where an embedding is sharded by rows, one rank holds all of theirs.
    """
    rng = np.random.default_rng((11, step))
    made: list[TrainSample] = []
    for index in range(_COUNT):
        length = int(rng.integers(20, 40)) if index % 2 == 0 else int(rng.integers(4, 12))
        mask = np.zeros(length, bool)
        tokens = rng.integers(0, max(2, vocab // 8) if index == POISON else vocab, length)
        prompt = length // (2 if index % 3 else 4)
        if index in _SHARING:
            other = made[_SHARING[index]]
            prompt = min(int(other.target_mask.argmax()), length - 1)
            tokens[:prompt] = other.token_ids[:prompt]
        if index != _WITHOUT_TARGETS:
            mask[prompt:] = True
        advantages = SCALES[step % STEPS] * (1.0 + rng.normal(size=int(mask.sum())))
        if poison and index == POISON:
            advantages[:] = np.nan
        made.append(TrainSample(tokens, mask, advantages=advantages.astype(np.float32), group_id=index // 2, index=index))
    return made


@dataclass
class Loss:
    """A sum over tokens that uses log-probs, entropy, advantages and every denominator; remembers what it was shown.

    The denominators differ from each other, and entropy has a gradient of its own. Of a value head's values: a squared error.
    """

    shown: list[TokenOutputs] = field(default_factory=list)  # detached, one entry a call

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch, counts: Denominators) -> LossOutput:
        advantages, entropy, logprobs = micro.advantages, outputs.entropy, outputs.logprobs
        if advantages is not None and outputs.values is not None:
            return self._of_values(outputs.values, advantages, counts)
        if advantages is None or entropy is None or logprobs is None:
            raise ValueError("the loss needs micro.advantages as given, outputs.logprobs and outputs.entropy; one of them is None")
        self.shown.append(TokenOutputs(logprobs.detach().clone(), entropy.detach().clone()))
        policy = -(advantages * logprobs).sum() / counts.tokens
        regular = -0.1 * (advantages.abs() * entropy).sum() / counts.sequences
        grouped = 0.01 * (advantages * logprobs * entropy).sum() / counts.groups
        return LossOutput(
            loss=policy + regular + grouped, stats={"logprob": logprobs.detach(), "entropy": entropy.detach()}
        )


    def _of_values(self, values: torch.Tensor, advantages: torch.Tensor, counts: Denominators) -> LossOutput:
        self.shown.append(TokenOutputs(values=values.detach().clone()))
        per_token = (values - advantages).square() / counts.tokens + 0.1 * values * advantages / counts.sequences
        return LossOutput(loss=per_token.sum() + 0.01 * values.sum() / counts.groups, stats={"value": values.detach()})


def by_sample(values: torch.Tensor, micro: MicroBatch, indices: Sequence[int], step: int) -> list[tuple[str, torch.Tensor]]:
    """Per-target values of a micro-batch cut by sample, each under a name that no split changes."""
    parts = torch.split(values, micro.target_lengths.tolist())
    return [(f"step {step + 1} sample {index}", part) for index, part in zip(indices, parts, strict=True)]
