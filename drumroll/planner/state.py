"""What lies on a rank between phases: parameters, gradients, optimizer state, from exact shapes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drumroll.backends import optim as optimizers
from drumroll.backends.base import OptimSpec
from drumroll.backends.buckets import buckets
from drumroll.backends.footprint import Footprint
from drumroll.models import dispatch
from drumroll.models.experts import expert_modules
from drumroll.models.scorer import Scorer
from drumroll.planner.trace import Live

OUTSIDE = -1  # the "block" or unit of what lies in none


@dataclass(slots=True, frozen=True)
class Stored:
    """One parameter; a tied weight is one."""

    name: str
    shape: torch.Size
    itemsize: int  # bytes a number at rest
    trained: bool
    block: int  # index of its transformer block, or OUTSIDE
    unit: int  # index of what it is gathered with, or OUTSIDE: the root
    head: bool = False  # the language-model head's: its gradient is the first that backward makes
    apart: int = 1  # of so many groups of ranks each has its own rows: those of experts that are shared
    saved: bool = True  # a checkpoint has it; with adapters it has these alone

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def gathered(self) -> int:
        """Elements of what a rank ever has whole."""
        return self.numel // self.apart

    def rows(self, ranks: int) -> int:
        """Elements of the largest piece, when cut by rows over `ranks`."""
        return -(-self.shape[0] // self.apart // (ranks // self.apart)) * self.shape[1:].numel() if self.shape else 1


def parameters(scorer: Scorer, footprint: Footprint, adapted: bool = False) -> list[Stored]:
    """All parameters, in the model's order. `adapted`: what trains are adapters."""
    block_of = {id(p): index for index, block in enumerate(scorer.blocks) for p in block.parameters()}
    units = footprint.gathering.units(scorer) if footprint.gathering is not None else ()
    unit_of = {id(p): index for index, unit in enumerate(units) for p in unit}
    head = {id(p) for p in scorer.head.parameters()}
    shared = _shared(scorer, footprint)
    return [
        Stored(
            name=scorer.hf_name(name),
            shape=p.shape,
            itemsize=p.element_size(),
            trained=p.requires_grad,
            block=block_of.get(id(p), OUTSIDE),
            unit=unit_of.get(id(p), OUTSIDE),
            head=id(p) in head,
            apart=footprint.experts if id(p) in shared else 1,
            saved=p.requires_grad or not adapted,
        )
        for name, p in scorer.named_parameters()
    ]


def _shared(scorer: Scorer, footprint: Footprint) -> set[int]:
    """Parameters of which groups of ranks have rows of their own, by id. Raises UserError for a model without any."""
    if footprint.experts == 1:
        return set()
    dispatch.check(scorer.hf, footprint.experts)
    return {id(p) for module in expert_modules(scorer.hf) for p in module.parameters(recurse=False)}


def share(tensors: Iterable[Stored], ranks: int, footprint: Footprint) -> int:
    """Elements of `tensors` on the rank that holds most of them, when they are divided over `ranks`."""
    if not footprint.flat:
        return sum(tensor.rows(ranks) for tensor in tensors)
    units: dict[int, int] = {}
    for tensor in tensors:
        units[tensor.unit] = units.get(tensor.unit, 0) + tensor.numel
    return sum(-(-numel // ranks) for numel in units.values())


@dataclass(slots=True, frozen=True)
class State:
    """Bytes at rest on the fullest rank: after the last reduction, before the optimizer's step."""

    parameter: int
    gradient: int
    optimizer: int  # on the device
    host: int  # in host memory, where something is off-loaded
    step: int  # what the optimizer holds beyond this while it steps
    between: int  # between steps, wherever it lies
    saved: int  # this rank's part of a checkpoint

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.optimizer


def state(tensors: Sequence[Stored], footprint: Footprint, optim: OptimSpec | None) -> State:
    """`optim` None: forward-only, no gradients and no optimizer."""
    parameter = _divided_bytes(tensors, footprint)
    if optim is None:
        return State(0, 0, 0, parameter, 0, parameter, 0) if footprint.offload else State(parameter, 0, 0, 0, 0, parameter, 0)
    trained = [tensor for tensor in tensors if tensor.trained]
    gradient = 4 * share(trained, footprint.gradient, footprint)
    on_device, on_host = _optimizer(trained, footprint, optim)
    step = _step(trained, footprint, optim)
    between = parameter + on_device + on_host + (gradient if footprint.gradients_stay else 0)
    saved = sum(t.itemsize * t.rows(footprint.optimizer) for t in tensors if t.saved) + on_device + on_host
    if footprint.offload:
        return State(0, 0, 0, parameter + gradient + on_device + on_host, step, between, saved)
    return State(parameter, gradient, on_device, on_host, step, between, saved)


def _divided_bytes(tensors: Sequence[Stored], footprint: Footprint) -> int:
    sizes = {tensor.itemsize for tensor in tensors}
    return sum(size * share([t for t in tensors if t.itemsize == size], footprint.parameter, footprint) for size in sizes)


def _pieces(trained: Sequence[Stored], footprint: Footprint, device: str) -> dict[str, torch.Tensor]:
    """Tensors like those that the optimizer of the fullest rank steps. Flat shards are taken as equal parts of each tensor."""
    cut = {t.name: -(-t.numel // footprint.optimizer) if footprint.flat else t.rows(footprint.optimizer) for t in trained}
    whole = footprint.optimizer == 1
    return {t.name: torch.empty(t.shape if whole else (cut[t.name],), device=device) for t in trained}


def _make(trained: Sequence[Stored], footprint: Footprint, optim: OptimSpec, pieces: Mapping[str, torch.Tensor]) -> optimizers.Optimizer:
    shapes = {tensor.name: tensor.shape for tensor in trained}
    whole = footprint.optimizer == 1
    wholes = optimizers.Wholes(
        shapes=shapes,
        matrices={t.name for t in trained if t.block != OUTSIDE and len(t.shape) == 2},
        gather=lambda name, piece: piece if whole else torch.empty(shapes[name], device=piece.device),
        start=lambda name: 0,
    )
    return optimizers.make(optim, pieces, wholes)


def _optimizer(trained: Sequence[Stored], footprint: Footprint, optim: OptimSpec) -> tuple[int, int]:
    """Bytes of its state on the device and in host memory: that of the optimizer itself, over tensors without memory."""
    with FakeTensorMode():
        made = _make(trained, footprint, optim, _pieces(trained, footprint, "meta"))
        tensors = _kept(made)
        host = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
        return sum(tensor.nbytes for tensor in tensors) - host, host


def _step(trained: Sequence[Stored], footprint: Footprint, optim: OptimSpec) -> int:
    """The most that a step makes beyond state and gradients: by taking one on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by which an optimizer asks what aliases what
        pieces = _pieces(trained, footprint, "cpu")
        made = _make(trained, footprint, optim, pieces)
        gradients = {name: torch.empty_like(piece) for name, piece in pieces.items()}
        live = Live([*pieces.values(), *gradients.values(), *_kept(made)])
        live.mark("forward", OUTSIDE)
        with live:
            made.step(gradients, 1e-6)
    return live.segments[-1].most


def _kept(optimizer: optimizers.Optimizer) -> list[torch.Tensor]:
    kinds = (*optimizer.moments().values(), *optimizer.shared().values())
    return [tensor for of_kind in kinds for tensor in of_kind.values()]


def largest(tensors: Sequence[Stored], limit: int, itemsize: int) -> int:
    """Bytes of the largest of the buckets of consecutive tensors, at most `limit` bytes each, or one larger tensor alone."""
    sizes = [tensor.numel * itemsize for tensor in tensors]
    return max((sum(bucket) for bucket in buckets(sizes, lambda size: size, limit)), default=0)


def padded(tensors: Iterable[Stored], ranks: int, footprint: Footprint) -> int:
    """Elements of the gathered tensors, padding included."""
    if footprint.flat:
        return ranks * share(list(tensors), ranks, footprint)
    return sum(ranks // tensor.apart * tensor.rows(ranks) for tensor in tensors)


def count(tensors: Iterable[Stored]) -> int:
    """Elements."""
    return sum(math.prod(tensor.shape) for tensor in tensors)
