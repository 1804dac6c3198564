"""The Backend contract: a thing that trains.

A backend decides where parameters, gradients and optimizer state live. One instance runs on every rank; all ranks call the same verbs in
the same order, because every verb below may communicate. `drumroll verify NAME` proves an implementation against `single`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel

from drumroll.types import Denominators, LossFn, LossOutput, MicroBatch, Stat, TokenOutputs

__all__ = [
    "Backend",
    "BackendPlugin",
    "Checkpointing",
    "Kind",
    "LoraSpec",
    "LossFn",
    "LossOutput",
    "ModelSpec",
    "NamedTensor",
    "OptimSpec",
    "RankContext",
    "StepResult",
]


# Which activations of a transformer block are kept for backward: all; its input; its input, in host memory; the results of its matmuls.
Checkpointing = Literal["none", "full", "offload", "selective"]


# What reads hidden states: the language model's own, or one that gives a value.
Head = Literal["lm", "value"]


# What a backend can release for a while, and the names of these in `memory`.
Kind = Literal["parameter", "gradient", "optimizer"]
PARAMETER: Kind = "parameter"
GRADIENT: Kind = "gradient"
OPTIMIZER: Kind = "optimizer"
KINDS: tuple[Kind, ...] = (PARAMETER, GRADIENT, OPTIMIZER)


@dataclass(slots=True, frozen=True)
class RankContext:
    """This process's place in the job. The default process group exists already, also at world size 1."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(slots=True, frozen=True)
class LoraSpec:
    """Low-rank adapters, stored in float32: they train, and nothing of the model itself does."""

    rank: int = 16
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    targets: tuple[str, ...] = ()  # names of linear layers, or ends of them; empty: all of the transformer blocks
    base_dtype: torch.dtype = torch.float32  # in which the model itself is stored; no wider than the compute dtype
    seed: int = 0  # of a fresh adapter
    start: str | None = None  # folder of a PEFT adapter to go on from; None: a fresh one


@dataclass(slots=True, frozen=True)
class ModelSpec:
    """Which model, and how it computes; by default as the defaults of a recipe say."""

    path: str  # a HF model folder on disk: config.json and safetensors
    compute_dtype: torch.dtype = torch.float32  # of matmuls; stored parameters are always fp32 (but see LoraSpec.base_dtype)
    temperature: float = 1.0  # log-probs are log_softmax(logits / temperature), as in sampling
    trainable: tuple[str, ...] = ()  # regular expressions over HF parameter names; empty: all
    head: Head = "lm"  # "value": a number a state instead of log-probs (models/value.py); it always trains
    lora: LoraSpec | None = None  # `trainable` is then empty
    layout: str = "auto"  # "rows", "packed" or "auto": how a micro-batch is laid out for the kernels
    attention: str = "sdpa"  # transformers' attn_implementation
    checkpointing: Checkpointing = "none"
    compile: bool = False  # torch.compile of every transformer block
    share_prompts: bool = True  # a prompt that samples of a micro-batch have in common is computed once, where the model lets it
    tile_mlp: int = 0  # tokens that a block's MLP works on at a time; 0: all
    balance: bool = False  # in training also say how evenly routers use their experts (TokenOutputs.balance)
    trust_remote_code: bool = False


@dataclass(slots=True, frozen=True)
class OptimSpec:
    """The optimizer and the clip before it. The learning rate comes with each step."""

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)  # adamw, and what muon leaves to it
    eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled
    momentum: float = 0.95  # muon
    offload: bool = False  # adamw: moments in host memory
    max_grad_norm: float = 1.0  # 0: no clipping


@dataclass(slots=True, frozen=True)
class StepResult:
    grad_norm: float  # global L2 norm before clipping, a plain float, the same on all ranks; inf when not finite
    skipped: bool  # non-finite norm: parameters and moments untouched on all ranks, gradients cleared


NamedTensor = tuple[str, torch.Tensor]


class BackendPlugin(Protocol):
    """What the file of a backend offers as `PLUGIN`: a class, or anything else that makes a backend from its options."""

    @property
    def Config(self) -> type[BaseModel]:
        """The backend's own options (`backend.<name>.*`), typed and documented in its file."""

    def __call__(self, options: Any) -> Backend:
        """A backend before `setup`; `options` is an instance of `Config`."""


class Backend(Protocol):
    """The verbs. Every public attribute a caller may use is here."""

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        """Meta device -> shard -> stream the safetensors file into the shards.

        `optim=None`: forward-only, no gradient or optimizer memory.
        """

    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> TokenOutputs:
        """Per-target log-probs (and entropy), no grad, eval mode. An empty micro-batch gives empty tensors and still communicates.

        Raises RunError for a model with a value head.
        """

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Float32 [N], no grad, eval mode: the value of the state before each target, from a value head; else as `logprobs`.

        Raises RunError for a model with a language-model head.
        """

    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        """Accumulate the gradient of `loss` summed (not averaged) over all ranks and micro-batches.

        The loss sees log-probs and entropy, or under a value head values alone.
        `last`: the final micro-batch before `step`. Returned stats are this rank's; `loss` has `sum` = this rank's share of the loss.
        """

    def step(self, lr: float) -> StepResult:
        """Clip by the global norm, optimizer step, zero the gradients; on a non-finite norm skip on all ranks together."""

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        """Buckets of (HF name, full tensor in `dtype`), each name once, tied names once; at most one bucket unsharded at a time.

        Adapters are merged in, in float32, before the cast; `apart`: they come under names of their own, as in a PEFT file without its
        prefix, and the weights below them as they are. `trained_only`: what training changes, and nothing else. Collective. A tensor may
        be a live parameter: read it, and before the next verb.
        """

    def reference(self) -> AbstractContextManager[None]:
        """Within, `logprobs` are those of the model that training began with: adapters are switched off, or as they were loaded.

        Raises RunError for a model without adapters: what it began with is no longer there.
        """

    def gradients(self) -> Iterator[NamedTensor]:
        """(HF name, full fp32 gradient) of every trainable parameter, after the last `forward_backward` before `step`.

        Collective; for verification.
        """

    def digests(self, dtype: torch.dtype, apart: bool = False) -> dict[str, int]:
        """Name of each of the `weights` -> additive digest (`drumroll.digest`) of the tensor cast to `dtype`. Collective.

        From shards: nothing is gathered but adapters, where they are merged.
        """

    def save(self, directory: Path) -> None:
        """Write parameters and optimizer state through DCP, named by HF name, readable by any backend at any world size. Collective.

        Of a model with adapters those alone, and digests of the model itself, which `load` compares.
        """

    def save_async(self, directory: Path) -> Future[None]:
        """As `save`, of the values at the time of the call, while training goes on; the future has the failure if there is one.

        A second save waits for the first. Collective. What has no use for it may save at once and give a future that is done.
        """

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises RunError when the names saved and restored differ. Collective."""

    def sleep(self, what: Collection[Kind]) -> None:
        """Copy these to host memory and release them on the device; verbs that need them raise RunError until `wake`."""

    def wake(self) -> None:
        """Bring back, bit for bit, all that sleeps. Nothing to do where nothing does."""

    def memory(self) -> dict[str, int]:
        """Bytes held now on this rank by kind: parameter, gradient, optimizer, unsharded, other; measured from live storages."""

    def close(self) -> None:
        """Release everything."""
