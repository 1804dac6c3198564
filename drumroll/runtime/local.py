"""A driver and N ranks on one machine: typed calls, first failure ends the run, nothing is left running.

`launch` starts one object (made by `factory`) on every rank and gives the driver a handle; `call` runs a method on all of them:

    with launch(factory, Worker, ranks=2) as ranks:
        reports = ranks.call(Worker.push, version)                # the same arguments everywhere
        losses = ranks.scatter(Worker.train, [(a,), (b,)])        # one tuple of arguments a rank

With one rank and `in_process` the object lives in the driver's process, so that a debugger works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drumroll.backends.base import RankContext
from drumroll.errors import UserError
from drumroll.runtime.failure import RankFailure
from drumroll.runtime.group import join
from drumroll.runtime.memory import check_processes, words_of_error
from drumroll.runtime.processes import Processes
from drumroll.runtime.ranks import R, Ranks, W


def launch(
    factory: Callable[[RankContext], W], ranks: int, device: str = "auto", timeout_s: float = 600.0, in_process: bool = True
) -> Ranks[W]:
    """Start `factory(context)`, which must pickle, on every rank. `timeout_s`: the longest that a call to processes may take.

    Raises UserError for missing devices and for more processes than memory has room for; this and every call raise RankFailure when a
    rank fails.
    """
    kind = resolve_device(device, ranks)
    if ranks == 1 and in_process:
        return _InProcess(factory, kind, timeout_s)
    if kind == "cpu":
        check_processes(ranks)
    return Processes(factory, ranks, kind, timeout_s)


def resolve_device(device: str, ranks: int) -> str:
    """`auto` is a GPU where there is one. Raises UserError when there are fewer GPUs than ranks."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < ranks:
        raise UserError(
            f"runtime.ranks={ranks} on device cuda, but this machine has {gpus} GPUs: lower runtime.ranks, or set runtime.device=cpu"
        )
    return device


class _InProcess(Ranks[W]):
    def __init__(self, factory: Callable[[RankContext], W], device: str, timeout_s: float) -> None:
        self.world_size = 1
        self._timeout_s = timeout_s
        self._context = join(0, 1, device, dist.HashStore(), 600.0)
        try:
            with _memory_in_words():
                self._worker = factory(self._context)
        except BaseException:
            dist.destroy_process_group()
            raise

    def scatter(self, method: Callable[..., R], args: Sequence[tuple[Any, ...]]) -> list[R]:
        # Nobody is there to see that it is silent, and a debugger must be able to hold it: it says where it stands, and goes on.
        faulthandler.dump_traceback_later(self._timeout_s, repeat=True, file=2)
        try:
            with _memory_in_words():
                return [method(self._worker, *args[0])]
        finally:
            faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        if dist.is_initialized():
            self._worker.close()
            dist.destroy_process_group()


@contextlib.contextmanager
def _memory_in_words() -> Iterator[None]:
    """Memory that runs out in the one rank there is, as it would be said of one among others. Any other error stays what it is."""
    try:
        yield
    except Exception as error:
        if words := words_of_error(error):
            raise RankFailure(f"rank 0 failed first:\n{words}{traceback.format_exc().rstrip()}") from error
        raise
