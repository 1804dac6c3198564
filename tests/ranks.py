"""Run a function on several gloo ranks from a test: hard time-out, the first rank's traceback, no process left behind.

The function must be importable (module level), because it is pickled by name. Ranks are forked from a server that has imported torch
and transformers once, so that starting some costs tenths of a second and not an import each. One call should still run several checks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# Seconds each, and imported lazily by what the ranks run: the server that ranks are forked from does it once.
SLOW_IMPORTS = (
    "peft",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


class RankFailure(AssertionError):
    """A rank raised, died or hung; the text is the traceback of the rank that failed first."""


@dataclass
class Failed:
    """One rank's end. `at`: `time.monotonic()`, one clock for all processes of a machine."""

    at: float
    text: str

    @property
    def lost_peers(self) -> bool:
        """The error speaks of a broken connection: some other rank ended before."""
        return any(mark in self.text for mark in ("closed by peer", "reset by peer", "likely closed", "Broken pipe"))


def first_of(failures: Iterable[Failed]) -> Failed:
    """The failure to blame. When a rank died without a word is known later than when a peer lost it, so losing peers counts last."""
    return min(failures, key=lambda failure: (failure.lost_peers, failure.at))


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`[fn(rank, world_size, *args) for each rank]`, each in a process of its own with a gloo process group and one thread.

    Results must be picklable (CPU tensors are). Raises RankFailure with the traceback of the rank that failed first, or naming the ranks
    that were still running after `timeout` seconds (their stacks are on stderr). In every case all processes are gone on return.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(SLOW_IMPORTS))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                receive, send = context.Pipe(duplex=False)
                work = (fn, rank, world_size, args, os.path.join(folder, "store"), send, timeout)
                process: BaseProcess = context.Process(target=_rank_main, args=work, name=f"rank {rank}", daemon=True)
                process.start()
                send.close()
                processes.append(process)
                pipes.append(receive)
            return _collect(processes, pipes, time.monotonic() + timeout)
        finally:
            for started in processes:
                started.kill()
            for started in processes:
                started.join()
            for pipe in pipes:
                pipe.close()


def _collect(processes: list[BaseProcess], pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"time-out: ranks {missing} of {len(pipes)} had not finished; their stacks are on stderr")
        for rank in missing:
            if pipes[rank] in ready:
                results[rank] = _receive(rank, processes[rank], pipes[rank])
        if any(isinstance(result, Failed) for result in results.values()):
            raise RankFailure(_first_failure(results, processes, pipes))
    return [results[rank] for rank in range(len(pipes))]


def _receive(rank: int, process: BaseProcess, pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(1.0)
        return Failed(time.monotonic(), f"rank {rank} died without a word, exit code {process.exitcode}")


def _first_failure(results: dict[int, Any], processes: list[BaseProcess], pipes: list[Connection]) -> str:
    """A failing rank makes its peers fail: give them a moment, then name the one that failed first."""
    time.sleep(0.2)
    for rank, pipe in enumerate(pipes):
        if rank not in results and pipe.poll():
            results[rank] = _receive(rank, processes[rank], pipe)
    return first_of(result for result in results.values() if isinstance(result, Failed)).text


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], store: str, pipe: Connection, timeout: float
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout - 2.0))
    threading.Thread(target=_end_with_test, daemon=True).start()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        pipe.send_bytes(pickle.dumps(fn(rank, world_size, *args)))
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it, before the peers lose their connection
        at = time.monotonic()  # before the words: on a busy machine they take their time
        text = f"rank {rank}: {error!r}\n{''.join(traceback.format_exception(error))}"
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(Failed(at, text)))
    finally:
        pipe.close()


def _end_with_test() -> None:
    """A time-out of pytest ends the process that runs the test at once, without a chance to kill its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
