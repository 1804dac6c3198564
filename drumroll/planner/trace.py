"""Activations of a micro-batch, by running the model's own code on fake tensors: shapes without memory or arithmetic.

What is counted are the storages that come into being in forward and backward, so whatever a block does (checkpointing, a tiled MLP, casts,
adapters, experts) counts as it is. Parameters and their gradients are left out: where those lie is the backend's matter.

[Note: what the trace stands for] Fake tensors lie on the CPU. On a GPU the same tensors are kept by the same functions, but for two:
attention, which every fused kernel, varlen or not, treats alike (queries, keys, values, output and one number a query are kept), and
activations that go to host memory, which are followed here as if they stayed (`Checkpointing` "offload") and taken off afterwards. What a
kernel allocates inside itself is not seen. `torch.compile` keeps less than what is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from drumroll.backends.base import ModelSpec
from drumroll.models import attention, build, dispatch
from drumroll.models.dispatch import Trip
from drumroll.models.head import chunk_rows
from drumroll.models.scorer import Scorer
from drumroll.types import MicroBatch

_PLAIN = attention.register("drumroll_plain", sdpa_attention_forward)  # a fused causal kernel without a mask
_CHUNKS = 2  # of the head, traced; the others would be like them


@dataclass(slots=True, frozen=True)
class Batch:
    """The largest micro-batch of a rank."""

    rows: int
    length: int  # tokens of a row, the last one, which is only predicted, included
    targets: int  # of a row

    @property
    def tokens(self) -> int:
        """That the model's body reads."""
        return self.rows * (self.length - 1)


Kind = Literal["forward", "backward"]
EDGE = -1  # the "block" of what comes before the first one: embedding
HEAD = -2  # of what comes after the last one: final norm and head


@dataclass(slots=True)
class Segment:
    """One block in one direction: bytes of activations when it begins, and the most until it ends."""

    kind: Kind
    block: int  # index, EDGE or HEAD
    start: int
    most: int


@dataclass(slots=True, frozen=True)
class Trace:
    train: list[Segment]  # forward and backward, in order
    score: list[Segment]  # forward alone, no gradient


class Live(TorchDispatchMode):
    """Bytes of live storages that operations within the mode have made."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.segments: list[Segment] = []
        self._known = known  # kept alive: their storages are not counted
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def mark(self, kind: Kind, block: int) -> None:
        """A segment begins."""
        self.segments.append(Segment(kind, block, self.bytes, self.bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a number read from a tensor that has no values
        out = _grouped(*args, **(kwargs or {})) if func is torch.ops.aten._grouped_mm.default else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        if self.segments:
            self.segments[-1].most = max(self.segments[-1].most, self.bytes)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            size = storage.nbytes()
            self.bytes += size
            self._seen[key] = weakref.ref(storage, lambda _: self._drop(key, size))

    def _drop(self, key: int, size: int) -> None:
        del self._seen[key]
        self.bytes -= size


def _grouped(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A grouped matmul of experts: torch knows its shapes for bfloat16 alone. [S, H] by [E, H, I], or in backward [I, S] by [S, H]."""
    groups = offs.shape if left.ndim == right.ndim == 2 else ()
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


@dataclass(slots=True, frozen=True)
class _EvenTrip:
    """As many rows come as leave, in memory of their own."""

    expert_R: torch.Tensor

    def there(self, rows_SH: torch.Tensor) -> torch.Tensor:
        return rows_SH.clone()

    def back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        return rows_RH.clone()


@dataclass(slots=True, frozen=True)
class _EvenRoads:
    """Between ranks that share experts, where all are chosen equally often. Nothing is sent."""

    ranks: int

    def trip(self, expert_S: torch.Tensor, here: int) -> Trip:
        return _EvenTrip(expert_S % here)


def build_fake(spec: ModelSpec, expert_ranks: int = 1) -> tuple[FakeTensorMode, Scorer]:
    """The model of `spec`, its parameters as they are stored, on fake tensors. Raises UserError as `build.build` does.

    `expert_ranks`: that share the experts of every layer; of these it has one rank's.
    """
    scorer = build.build(replace(spec, compile=False, attention=_attention(spec)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}  # by the id of what they stand for: tied weights stay one
    with mode:
        for module in scorer.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = fakes.setdefault(id(tensor), _fake(tensor))  # type: ignore[assignment]
        if expert_ranks > 1:
            dispatch.install(scorer.hf, _EvenRoads(expert_ranks), spec.tile_mlp)
    return mode, scorer


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    on_cpu = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(on_cpu, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else on_cpu


def _attention(spec: ModelSpec) -> str:
    fused = "flash" in spec.attention or (spec.attention == "sdpa" and spec.layout != "packed")
    return _PLAIN if fused else spec.attention


def trace(mode: FakeTensorMode, scorer: Scorer, batch: Batch, device: torch.device, *, cast: bool) -> Trace:
    """What the largest micro-batch makes the model hold.

    `device`: that of the run, which decides the head's chunks. `cast`: the model casts its parameters itself; else they come in the
    compute dtype, and are left so.
    """
    scorer.cast_parameters = cast
    with mode:
        for parameter in () if cast else list(scorer.parameters()):
            parameter.data = parameter.data.to(scorer.compute_dtype)
    with mode, _marked(scorer) as live:
        with torch.no_grad():
            micro, missing = _micro(scorer, batch, device)
            live.mark("forward", EDGE)
            scorer(micro)
        score, live.segments = live.segments, []
        if not any(parameter.requires_grad for parameter in scorer.parameters()):
            return Trace([], score)
        live.mark("forward", EDGE)
        outputs = [output for output in scorer(micro, True) if output is not None]
        total = torch.cat(outputs).sum()
        live.mark("backward", HEAD)
        del outputs
        total.backward()
        return Trace(_with_all_targets(live.segments, scorer, missing), score)


def _micro(scorer: Scorer, batch: Batch, device: torch.device) -> tuple[MicroBatch, int]:
    """A batch with targets enough for some chunks of the head, and how many it lacks."""
    vocabulary = scorer.head.weight.shape[0]
    wanted = batch.rows * batch.targets
    targets = min(batch.targets, -(-_CHUNKS * chunk_rows(vocabulary, 4, device) // batch.rows))
    ends = torch.arange(1, batch.rows + 1) * batch.length
    positions = (ends[:, None] - 1 - torch.arange(targets).flip(0)).flatten()
    micro = MicroBatch(
        token_ids=torch.zeros(batch.rows * batch.length, dtype=torch.int64),
        lengths=[batch.length] * batch.rows,
        target_positions=positions,
        target_lengths=torch.full((batch.rows,), targets),
    )
    return micro, wanted - len(positions)


def _with_all_targets(segments: list[Segment], scorer: Scorer, missing: int) -> list[Segment]:
    """Of every target the head's input is there from the head on, and its gradient in backward; [targets, hidden] each."""
    width = scorer.head.weight.shape[1] * scorer.compute_dtype.itemsize * missing
    for segment in segments:
        if segment.block == HEAD:
            copies = 1 if segment.kind == "forward" else 2
            segment.most += copies * width
            segment.start += (copies - 1) * width
    return segments


@contextmanager
def _marked(scorer: Scorer) -> Iterator[Live]:
    """Within, blocks mark their segments, and gradients of parameters vanish as soon as they are there."""
    live = Live([*scorer.parameters(), *scorer.buffers()])
    last = len(scorer.blocks) - 1

    def enter(index: int) -> Any:
        return lambda module, args: live.mark("forward", index)

    def leave(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: live.mark("backward", index))
            if index == last:
                live.mark("forward", HEAD)

        return hook

    def entered_backward(module: nn.Module, args: Any) -> None:
        if args and args[0].requires_grad:
            args[0].register_hook(lambda gradient: live.mark("backward", EDGE))

    handles = [block.register_forward_pre_hook(enter(index)) for index, block in enumerate(scorer.blocks)]
    handles += [block.register_forward_hook(leave(index)) for index, block in enumerate(scorer.blocks)]
    handles.append(scorer.blocks[0].register_forward_pre_hook(entered_backward))
    for parameter in scorer.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_forget))
    try:
        with live:
            yield live
    finally:
        for handle in handles:
            handle.remove()


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
