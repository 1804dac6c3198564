"""The verbs of the Backend contract, once, for every torch backend; a Placement says where things lie."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from drumroll.backends import clip, state
from drumroll.backends import optim as optimizers
from drumroll.backends.adapters import DIGESTS, SCALE, Adapters, check_base
from drumroll.backends.base import GRADIENT, KINDS, OPTIMIZER, PARAMETER, Kind, ModelSpec, NamedTensor, OptimSpec, RankContext, StepResult
from drumroll.backends.buckets import buckets
from drumroll.backends.footprint import Footprint
from drumroll.backends.placement import Placement
from drumroll.backends.shards import Later, made
from drumroll.backends.sleeping import Sleeper
from drumroll.digest import digest
from drumroll.errors import RunError
from drumroll.models import build, stream
from drumroll.types import Denominators, LossFn, LossOutput, MicroBatch, Stat, TokenOutputs

BUCKET_BYTES = 64 << 20  # of full tensors handed out at a time by `weights`


@dataclass(frozen=True)
class TorchPlugin:
    """What the file of a torch backend offers as PLUGIN: makes the backend from its options."""

    Config: type[BaseModel]
    placement: Callable[[Any], Placement]
    footprint: Callable[[Any, int], Footprint] | None = None  # (options, ranks): see there; None: `drumroll plan` cannot foresee its memory

    def __call__(self, options: BaseModel) -> TorchBackend:
        return TorchBackend(self.placement(options))


class TorchBackend:
    """See `drumroll.backends.base.Backend` for what each verb promises."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def setup(self, ctx: RankContext, model: ModelSpec, optim: OptimSpec | None) -> None:
        self._placement.check(ctx)
        self._ctx = ctx
        self._sleeper = Sleeper(ctx.device)
        self._saver = state.BackgroundSaver()
        self._scorer = build.build(model)
        self._valued = model.head == "value"
        if optim is None:
            self._scorer.requires_grad_(False)
        tensors_before = len(list(self._scorer.parameters()))
        self._placement.place(self._scorer, ctx, model)
        self._division = self._placement.division
        stream.load(self._scorer, Path(model.path), self._division.held)
        self._lora = Adapters(self._scorer, model.lora, self._division) if model.lora is not None else None
        self._module = self._placement.wrap(self._scorer, ctx)
        self._module.eval()  # no dropout: old, new and reference log-probs are of one distribution
        self._parameters = {self._scorer.hf_name(name): parameter for name, parameter in self._scorer.named_parameters()}
        matrices = self._lora.matrices if self._lora is not None else ()
        self._weights = {name: parameter for name, parameter in self._parameters.items() if name not in matrices}
        self._saved = {name: self._parameters[name] for name in matrices} or self._parameters
        self._base_digests: list[int] | None = None
        self._check_parameters(tensors_before, model.lora.base_dtype if model.lora is not None else torch.float32)
        self._trainable = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._optim = optim
        pieces = {name: self._division.owned(parameter).local for name, parameter in self._trainable.items()}
        self._optimizer = optimizers.make(optim, pieces, self._wholes()) if optim is not None else None

    def _wholes(self) -> optimizers.Wholes:
        """Whole tensors for optimizers that need them."""
        hidden = {id(parameter) for block in self._scorer.blocks for parameter in block.parameters()}
        return optimizers.Wholes(
            shapes={name: self._division.held(parameter).shape for name, parameter in self._trainable.items()},
            matrices={n for n, p in self._trainable.items() if id(p) in hidden and len(self._division.held(p).shape) == 2},
            gather=lambda name, piece: self._division.gather([self._trainable[name]], [piece])[0],
            start=lambda name: self._division.owned(self._trainable[name]).start,
        )

    def _check_parameters(self, tensors_before: int, base_dtype: torch.dtype) -> None:
        """What the numbers contract says about storage is asserted, not assumed. `base_dtype`: of the model below adapters."""
        if len(self._parameters) != tensors_before:
            raise RunError(f"{len(self._parameters)} parameters after loading, expected {tensors_before}: a tied weight came apart")
        for name, tensor in (*self._parameters.items(), *self._scorer.named_buffers()):
            if tensor.is_meta:
                raise RunError(f"{name} is still on the meta device after loading")
        for name, parameter in self._parameters.items():
            expected = torch.float32 if parameter.requires_grad else base_dtype
            if parameter.dtype is not expected:
                raise RunError(f"{name} is stored in {parameter.dtype}, expected {expected} (compute dtype is a separate choice)")

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, entropy: bool = False) -> TokenOutputs:
        if self._valued:
            raise RunError("logprobs: this backend instance has a value head (ModelSpec.head); ask it for values")
        self._sleeper.require("logprobs", (PARAMETER,))
        outputs = self._outputs(micro, entropy)
        self._placement.after_forward()
        return outputs

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> torch.Tensor:
        if not self._valued:
            raise RunError("values: this backend instance has a language-model head (ModelSpec.head); ask it for logprobs")
        self._sleeper.require("values", (PARAMETER,))
        outputs = self._outputs(micro, entropy=False)
        self._placement.after_forward()
        assert outputs.values is not None
        return outputs.values

    def forward_backward(self, micro: MicroBatch, loss: LossFn, denominators: Denominators, last: bool) -> dict[str, Stat]:
        if self._optimizer is None:
            raise RunError("this backend instance is forward-only (set up with optim=None): it cannot train")
        self._sleeper.require("forward_backward", (PARAMETER, GRADIENT))
        with self._placement.sync(last):
            outputs = self._outputs(micro, entropy=True)
            result = loss(outputs, micro, denominators)
            total = result.loss
            if len(micro.target_positions) == 0:
                scores = outputs.values if outputs.logprobs is None else outputs.logprobs
                assert scores is not None
                total = total + scores.sum()  # an empty sum: 0, but attached, so that this rank's collectives match
            torch.autograd.backward(total * self._placement.averaged_over)
        return _stats(result)

    def _outputs(self, micro: MicroBatch, entropy: bool) -> TokenOutputs:
        scores, entropies, balance = self._module(micro, entropy)
        expected = micro.target_positions.shape
        if scores.dtype is not torch.float32 or scores.shape != expected:
            what = "values" if self._valued else "log-probs"
            raise RunError(f"expected float32 {what} {tuple(expected)}, got {scores.dtype} {tuple(scores.shape)}")
        if self._valued:
            return TokenOutputs(values=scores)
        return TokenOutputs(logprobs=scores, entropy=entropies if entropy else None, balance=balance)

    def step(self, lr: float) -> StepResult:
        if self._optimizer is None or self._optim is None:
            raise RunError("this backend instance is forward-only (set up with optim=None): it cannot step")
        self._sleeper.require("step", KINDS)
        gradients = self._gradients()
        norm = clip.global_norm(list(gradients.values()))
        skipped = norm == float("inf")
        if not skipped:
            if self._optim.max_grad_norm > 0:
                clip.clip_(list(gradients.values()), norm, self._optim.max_grad_norm)
            self._optimizer.step({name: clip.local_part(gradient) for name, gradient in gradients.items()}, lr)
            self._placement.after_update()
        self._placement.clear_gradients(list(self._trainable.values()))
        return StepResult(grad_norm=norm, skipped=skipped)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Name -> this rank's piece, as `Placement.gradient` gives it."""
        found = {name: self._placement.gradient(parameter) for name, parameter in self._trainable.items()}
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        if absent := [name for name in self._trainable if name not in gradients]:
            raise RunError(
                f"{len(absent)} of {len(self._trainable)} trainable parameters got no gradient since the last step, first {absent[0]}; "
                "leave out of model.trainable what the loss does not reach"
            )
        return gradients

    def weights(self, dtype: torch.dtype, trained_only: bool = False, apart: bool = False) -> Iterator[list[NamedTensor]]:
        self._sleeper.require("weights", (PARAMETER,))
        for names in self._buckets(dtype, trained_only, apart):
            yield self._full(names, dtype, apart)  # no name for it here: a bucket dies with its user's last reference, before the next

    def _buckets(self, dtype: torch.dtype, trained_only: bool, apart: bool) -> Iterator[list[str]]:
        """Names of the model's weights; `apart`: and of its adapters."""
        named = self._parameters if apart else self._weights
        changing = () if apart or self._lora is None else self._lora.weights
        wanted = {n: p for n, p in named.items() if not trained_only or p.requires_grad or n in changing}
        return buckets(wanted, lambda name: self._division.held(wanted[name]).shape.numel() * dtype.itemsize, BUCKET_BYTES)

    def _full(self, names: list[str], dtype: torch.dtype, apart: bool) -> list[NamedTensor]:
        weights = {name: self._parameters[name] for name in names}
        merged = self._merged(weights, apart)
        held = [merged.get(name, self._division.held(parameter).local) for name, parameter in weights.items()]
        parts = [part.to(self._ctx.device).to(dtype) for part in held]  # in this order: off-loaded ones are cast and gathered by the device
        return list(zip(names, self._division.whole(list(weights.values()), parts), strict=True))

    def _merged(self, weights: Mapping[str, nn.Parameter], apart: bool) -> dict[str, torch.Tensor]:
        """Of those that are adapted, and not to be sent apart from it: what this rank holds of them, with the adapter in it."""
        return {} if apart or self._lora is None else self._lora.merged(weights)

    def reference(self) -> AbstractContextManager[None]:
        if self._lora is None:
            raise RunError("reference: the model that training began with is no longer there; with adapters (ModelSpec.lora) it would be")
        self._sleeper.require("reference", (PARAMETER,))
        return self._lora.as_begun()

    def gradients(self) -> Iterator[NamedTensor]:
        for name, gradient in self._gradients().items():
            yield name, self._division.gather([self._trainable[name]], [clip.local_part(gradient)])[0]

    def digests(self, dtype: torch.dtype, apart: bool = False) -> dict[str, int]:
        self._sleeper.require("digests", (PARAMETER,))
        parts: dict[str, int] = {}
        with torch.no_grad():
            for names in self._buckets(dtype, trained_only=False, apart=apart):
                weights = {name: self._parameters[name] for name in names}
                merged = self._merged(weights, apart)
                parts |= {name: self._digest(parameter, merged.get(name), dtype) for name, parameter in weights.items()}
        return dict(zip(parts, self._add_up(list(parts.values())), strict=True))

    def _digest(self, parameter: nn.Parameter, merged: torch.Tensor | None, dtype: torch.dtype) -> int:
        """Of this rank's piece; `merged`: what is held of the parameter with its adapter, where it has one."""
        owned = self._division.owned(parameter)
        piece = owned.local
        if merged is not None:
            piece = merged.reshape(-1).narrow(0, owned.start - self._division.held(parameter).start, piece.numel())
        return digest(piece.to(self._ctx.device).to(dtype), owned.start)

    def _add_up(self, parts: list[int]) -> list[int]:
        """Sums modulo 2^64 over the ranks that hold the other pieces."""
        if self._division.group is None:
            return parts
        signed = [part - (1 << 64) if part >= 1 << 63 else part for part in parts]
        totals = torch.tensor(signed, dtype=torch.int64, device=self._ctx.device)  # wraps around as it should
        dist.all_reduce(totals, group=self._division.group)
        return [total % (1 << 64) for total in totals.tolist()]

    def save(self, directory: Path) -> None:
        self._sleeper.require("save", (PARAMETER, OPTIMIZER))
        self._saver.wait()
        state.save(directory, self._stored() | self._base())

    def save_async(self, directory: Path) -> Future[None]:
        self._sleeper.require("save_async", (PARAMETER, OPTIMIZER))
        return self._saver.start(directory, self._stored() | self._base())

    def load(self, directory: Path) -> None:
        self._sleeper.require("load", (PARAMETER, OPTIMIZER))
        self._check_base(directory)
        tensors = {name: made(tensor) for name, tensor in self._stored().items()}
        state.load(directory, tensors, (state.MODEL,) if self._optimizer is None else (state.MODEL, state.OPTIMIZER))
        for name, (parameter, piece) in self._pieces().items():
            self._division.restore(parameter, piece, tensors[name])
        if self._optimizer is not None:
            self._optimizer.set_steps(int(tensors[f"{state.OPTIMIZER}step"]))
        self._placement.after_update()

    def _stored(self) -> dict[str, torch.Tensor | Later]:
        """Name in a checkpoint -> tensor; gradients play no part in it."""
        tensors: dict[str, torch.Tensor | Later] = {}
        tensors |= {name: self._division.stored(parameter, piece) for name, (parameter, piece) in self._pieces().items()}
        if self._optimizer is not None:
            for kind, of_kind in self._optimizer.shared().items():
                tensors |= {f"{state.OPTIMIZER}{name}.{kind}": tensor for name, tensor in of_kind.items()}
            tensors[f"{state.OPTIMIZER}step"] = torch.tensor(self._optimizer.steps)
        return tensors

    def _base(self) -> dict[str, torch.Tensor]:
        """Name in a checkpoint -> what adapters were trained on: a digest of every weight below them as it is stored, and their scale."""
        if self._lora is None:
            return {}
        if self._base_digests is None:  # it never changes
            parts = [self._digest(self._weights[name], None, self._weights[name].dtype) for name in sorted(self._weights)]
            self._base_digests = self._add_up(parts)
        signed = [part - (1 << 64) if part >= 1 << 63 else part for part in self._base_digests]
        return {DIGESTS: torch.tensor(signed), SCALE: torch.tensor(self._lora.scale, dtype=torch.float64)}

    def _check_base(self, directory: Path) -> None:
        if self._lora is not None:
            saved = self._base()
            state.load(directory, saved, (state.BASE,))
            check_base(directory, sorted(self._weights), saved, self._base())

    def _pieces(self) -> dict[str, tuple[nn.Parameter, torch.Tensor]]:
        """Name in a checkpoint -> the parameter it belongs to, and this rank's live piece of it or of a moment."""
        pieces = {f"{state.MODEL}{name}": (p, self._division.owned(p).local) for name, p in self._saved.items()}
        if self._optimizer is not None:
            for kind, moments in self._optimizer.moments().items():
                pieces |= {f"{state.OPTIMIZER}{name}.{kind}": (self._trainable[name], moment) for name, moment in moments.items()}
        return pieces

    def sleep(self, what: Collection[Kind] = KINDS) -> None:
        for kind in what:
            self._sleeper.sleep(kind, self._held(kind))

    def wake(self) -> None:
        self._sleeper.wake()

    def memory(self) -> dict[str, int]:
        kinds: dict[str, list[torch.Tensor]] = {kind: self._held(kind) for kind in KINDS}
        kept = self._lora.kept if self._lora is not None else []
        kinds |= {"unsharded": self._placement.unsharded(), "other": [*self._scorer.buffers(), *self._saver.held(), *kept]}
        seen: set[int] = set()
        return {kind: _storage_bytes(tensors, seen) for kind, tensors in kinds.items()}

    def _held(self, kind: Kind) -> list[torch.Tensor]:
        """The tensors of a kind that this rank holds between verbs; none while they sleep."""
        if kind in self._sleeper.asleep:
            return []
        parameters = self._parameters.values()
        if kind == PARAMETER:
            return [self._division.held(parameter).local for parameter in parameters]
        if kind == GRADIENT:
            return [clip.local_part(gradient) for p in parameters if (gradient := self._placement.gradient(p)) is not None]
        kept = (*self._optimizer.moments().values(), *self._optimizer.shared().values()) if self._optimizer is not None else ()
        return [tensor for of_kind in kept for tensor in of_kind.values()]

    def close(self) -> None:
        self._saver.close()
        del self._module, self._scorer, self._placement, self._division, self._optimizer, self._lora
        del self._parameters, self._weights, self._saved, self._trainable
        gc.collect()  # wrapped modules are full of reference cycles


def _stats(result: LossOutput) -> dict[str, Stat]:
    """Sum, count and max of each reported vector, and the loss, with one transfer from the device."""
    filled = {name: vector for name, vector in result.stats.items() if vector.numel() > 0}
    totals = [vector.sum(dtype=torch.float64) for vector in filled.values()]
    largest = [vector.max().double() for vector in filled.values()]
    loss, *numbers = torch.stack([result.loss.detach().double(), *totals, *largest]).tolist()
    stats = {name: Stat() for name in result.stats}
    for (name, vector), total, top in zip(filled.items(), numbers[: len(filled)], numbers[len(filled) :], strict=True):
        stats[name] = Stat(sum=total, count=vector.numel(), max=top)
    stats["loss"] = Stat(sum=loss, count=1, max=loss)
    return stats


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the live storages below `tensors`, each storage once."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
