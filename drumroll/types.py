"""What flows through one step: Prompt -> Group of Rollouts -> TrainSamples -> MicroBatch -> Stat.

Axis suffixes in shapes: T tokens of one sample (prompt and response), N target tokens (those that carry loss),
S samples. Samples are ragged: nothing here is ever padded. No module-level torch import: `drumroll.config` and the
planning of a run work without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch

Stream = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]


@dataclass(slots=True, frozen=True)
class Prompt:
    """One draw from a data stream, tokenised once."""

    group_id: int  # serial number of the draw within its stream, never reused
    prompt_id: str  # where the row came from, e.g. "train.jsonl:17" or "sort:0:17"
    text: str  # what the model reads, decoded from nothing: the rendered chat template or the raw prompt
    token_ids: list[int]  # [P]
    columns: Mapping[str, Any]  # every other field of the row (answer, ...): what rewards judge against
    stream: Stream = "train"


@dataclass(slots=True)
class Rollout:
    """One sampled response to a prompt, with the log-probs the sampler actually drew from."""

    index: int  # sample index within its group
    token_ids: list[int]  # [R] response tokens, the end-of-sequence token included when it was sampled
    logprobs: list[float]  # [R] natural log, under the distribution sampled from
    version: int  # weight version that produced it
    finish_reason: FinishReason
    text: str  # response decoded without special tokens
    reward: float | None = None  # None: no verdict; the sample is left out and counted
    breakdown: dict[str, float | None] = field(default_factory=dict)  # reward function name -> its value


@dataclass(slots=True)
class Group:
    """All rollouts of one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]


@dataclass(slots=True)
class TrainSample:
    """One token sequence to train on. Per-target arrays are aligned with the true entries of `target_mask`."""

    token_ids: np.ndarray  # int64 [T]
    target_mask: np.ndarray  # bool [T]; entry 0 is always false: nothing predicts the first token
    advantages: np.ndarray | None = None  # float32 [N]
    engine_logprobs: np.ndarray | None = None  # float32 [N], from the sampler
    old_logprobs: np.ndarray | None = None  # float32 [N], from the trainer before the first optimizer step of the batch
    ref_logprobs: np.ndarray | None = None  # float32 [N], from the frozen reference
    values: np.ndarray | None = None  # float32 [N], the critic's before the first optimizer step: of the state before each target
    returns: np.ndarray | None = None  # float32 [N], what the critic is to learn
    group_id: int = -1
    index: int = -1  # sample index within its group

    @property
    def n_targets(self) -> int:
        return int(self.target_mask.sum())


@dataclass(slots=True, frozen=True)
class Denominators:
    """Counts over all ranks and micro-batches of one optimizer step; samples without a target count in none."""

    tokens: int
    sequences: int
    groups: int


@dataclass(slots=True)
class MicroBatch:
    """Samples that go through the model together on one rank, flat and ragged. Zero samples make a fill-in."""

    token_ids: torch.Tensor  # int64 [sum T]
    lengths: list[int]  # [S] tokens of each sample
    target_positions: torch.Tensor  # int64 [N]: index into token_ids of each predicted token (never a first token)
    target_lengths: torch.Tensor  # int64 [S]: targets of each sample; sums to N
    prompts: list[tuple[int, int]] | None = None  # [S]: tokens before a sample's first target, and the first sample that has the same
    advantages: torch.Tensor | None = None  # float32 [N]
    engine_logprobs: torch.Tensor | None = None  # float32 [N]
    old_logprobs: torch.Tensor | None = None  # float32 [N]
    ref_logprobs: torch.Tensor | None = None  # float32 [N]
    values: torch.Tensor | None = None  # float32 [N]
    returns: torch.Tensor | None = None  # float32 [N]


@dataclass(slots=True)
class TokenOutputs:
    """What a backend says about each target token of a micro-batch; the loss sees nothing else of the model."""

    logprobs: torch.Tensor | None = None  # float32 [N], natural log, at the configured temperature; None from a value head
    entropy: torch.Tensor | None = None  # float32 [N], nats
    values: torch.Tensor | None = None  # float32 [N], from a value head: of the state before each target
    balance: torch.Tensor | None = None  # float32 [S], with graph: how unevenly routers use their experts, 1 at best (models/experts.py)


@dataclass(slots=True)
class LossOutput:
    """What a loss function gives back: a scalar with graph, and detached per-token vectors to report."""

    loss: torch.Tensor  # float32 [], already divided by the global denominator
    stats: dict[str, torch.Tensor]  # name -> float32 [any length]; reported as sum, mean and max over all ranks


LossFn = Callable[[TokenOutputs, MicroBatch, Denominators], LossOutput]


@dataclass(slots=True)
class Stat:
    """A mean that can still be merged over micro-batches and ranks, and the largest value seen."""

    sum: float = 0.0
    count: int = 0
    max: float = float("-inf")

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def merge(self, other: Stat) -> Stat:
        return Stat(self.sum + other.sum, self.count + other.count, max(self.max, other.max))


@dataclass(slots=True)
class StepStats:
    """One optimizer step, the same on all ranks once merged."""

    grad_norm: float  # global L2 norm before clipping
    skipped: bool  # a non-finite norm: nothing was updated, on any rank
    stats: dict[str, Stat]  # e.g. loss (its `sum` is the step's loss), entropy, ...
