"""How many bytes of tensors were live at once: from the allocator, not from resident memory and not from shapes.

[Note: lost frees] The profiler sees what its own thread allocates and frees. A gloo collective runs on a thread of gloo's, which holds
its tensors until a moment after the waiting thread has gone on; where it is the last to hold them, their end goes unseen, and they are
counted as if they stayed. So whoever watches waits a moment after every collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumroll.backends.base import Backend
from drumroll.planner.phases import LOGPROBS, PUSH, STEP, TRAIN
from drumroll.planner.trace import Batch
from drumroll.types import Denominators, LossOutput, MicroBatch, TokenOutputs

_LETTING_GO_S = 0.002
_POINT_TO_POINT = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)  # on the caller's thread; a send ends when the peer receives


@dataclass(slots=True)
class Peak:
    """Bytes above what was allocated when measuring began; both are set when it ends."""

    most: int = 0
    left: int = 0  # at the end


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Watch the allocations of this process on `device` within the block. On a CPU every one is seen, those inside torch's C++ too."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.most = torch.cuda.max_memory_allocated(device) - before
        peak.left = torch.cuda.memory_allocated(device) - before
        return
    letting_go = _LetGo()  # type: ignore[no-untyped-call]
    with letting_go, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        peak.left += event.nbytes()
        peak.most = max(peak.most, peak.left)


class _LetGo(TorchDispatchMode):
    """After each collective gloo's thread has time to let go of its tensors. See [Note: lost frees]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func not in _POINT_TO_POINT:
            for work in tree_leaves(out):
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
            time.sleep(_LETTING_GO_S)
        return out


@dataclass(slots=True, frozen=True)
class Measured:
    """One rank of a backend that has trained a step."""

    rest: dict[str, int]  # `Backend.memory` after the last reduction, before the optimizer's step
    peaks: dict[str, int]  # phase -> most bytes at once, what lay there before included


def measure(
    backend: Backend, batch: Batch, micros: int, dtype: torch.dtype, device: torch.device, group: int = 1, valued: bool = False
) -> Measured:
    """Score, train and hand out weights once to warm up, then once under watch. Collective.

    `group`: see `micro_batch`. `valued`: the model has a value head, and scores are its values.
    """
    micro = micro_batch(batch, device, group)
    for _ in range(2):  # DDP makes its buckets anew after the first step
        train(backend, batch, micros, device, group)
        backend.step(0.0)
    peaks: dict[str, int] = {}
    peaks[LOGPROBS] = _watched(backend, device, lambda: backend.values(micro) if valued else backend.logprobs(micro))
    peaks[TRAIN] = _watched(backend, device, lambda: train(backend, batch, micros, device, group))
    rest = backend.memory()
    peaks[STEP] = _watched(backend, device, lambda: backend.step(0.0))
    peaks[PUSH] = _watched(backend, device, lambda: [len(bucket) for bucket in backend.weights(dtype)])
    return Measured(rest, peaks)


def measure_save(backend: Backend, directory: Path, device: torch.device) -> tuple[int, int]:
    """Most bytes at once while the backend's first save in the background is begun, and those of them that it keeps. Collective."""
    before = sum(backend.memory().values())
    most = _watched(backend, device, lambda: backend.save_async(directory).result())
    return most, sum(backend.memory().values()) - before


def micro_batch(batch: Batch, device: torch.device, group: int = 1) -> MicroBatch:
    """Random-looking tokens; the last `batch.targets` of each row are targets; `group` rows each have a prompt in common."""
    ends = torch.arange(1, batch.rows + 1) * batch.length
    positions = (ends[:, None] - batch.targets + torch.arange(batch.targets)).flatten()
    prompt, owners = batch.length - batch.targets, torch.arange(batch.rows) // group * group
    token_ids = (torch.arange(batch.rows * batch.length) * 7 % 31).view(batch.rows, batch.length)
    token_ids[:, :prompt] = token_ids[owners, :prompt]
    return MicroBatch(
        token_ids=token_ids.flatten().to(device),
        lengths=[batch.length] * batch.rows,
        target_positions=positions.to(device),
        target_lengths=torch.full((batch.rows,), batch.targets, device=device),
        prompts=[(prompt, owner) for owner in owners.tolist()],
    )


def train(backend: Backend, batch: Batch, micros: int, device: torch.device, group: int = 1) -> None:
    """Forward and backward of all micro-batches, without the step. Collective."""
    micro = micro_batch(batch, device, group)
    for index in range(micros):
        backend.forward_backward(micro, _loss, Denominators(1, 1, 1), last=index == micros - 1)


def _loss(outputs: TokenOutputs, micro: MicroBatch, denominators: Denominators) -> LossOutput:
    if outputs.values is not None:
        return LossOutput(loss=outputs.values.sum(), stats={})
    assert outputs.logprobs is not None and outputs.entropy is not None
    return LossOutput(loss=outputs.logprobs.sum() + outputs.entropy.sum(), stats={})


def _watched(backend: Backend, device: torch.device, act: Callable[[], object]) -> int:
    before = sum(backend.memory().values())
    with peak_bytes(device) as peak:
        act()
    return before + peak.most
