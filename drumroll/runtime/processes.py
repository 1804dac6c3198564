"""Rank processes: forked from a server that has imported what they need, called through pipes, ended together."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drumroll import env
from drumroll.backends.base import RankContext
from drumroll.errors import RunError, UserError
from drumroll.runtime import stacks
from drumroll.runtime.failure import Failure, RankFailure, first_cause
from drumroll.runtime.group import join
from drumroll.runtime.memory import ran_out, words_of_error, words_of_kill
from drumroll.runtime.ranks import R, Ranks, W

GRACE_S = 1.0  # how long peers of a failed rank may take to report their own side
CLOSE_S = 10.0  # how long ranks may take to close by themselves


class Processes(Ranks[W]):
    """Raises RankFailure, with all of them ended, when one fails. `timeout_s`: the longest that a call may take."""

    def __init__(self, factory: Callable[[RankContext], W], ranks: int, device: str, timeout_s: float) -> None:
        self.world_size = ranks
        self._timeout_s = timeout_s
        self._store = _listening_store(timeout_s)
        # Ranks fork from a server that has imported what they all need once: starting four of them costs one import, not four.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "transformers", "drumroll.backends.engine", "drumroll.runtime.worker"]
        )
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._senders = ThreadPoolExecutor(ranks, thread_name_prefix="drumroll-send")
        self._stacks = tempfile.TemporaryDirectory(prefix="drumroll-stacks-")
        self._killed_before = ran_out()
        self._ended = False
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, factory, rank, ranks, device, self._store.port, timeout_s, Path(self._stacks.name)),
                    name=f"drumroll-rank-{rank}",
                    daemon=True,
                )
                with _out_of_reach():
                    process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._collect()
        except BaseException:
            self._kill()
            raise

    def scatter(self, method: Callable[..., R], args: Sequence[tuple[Any, ...]]) -> list[R]:
        """Run `method` in every process, each with its own tuple of arguments, which must pickle. Raises RankFailure."""
        if len(args) != self.world_size:
            raise ValueError(f"{method.__name__}: {len(args)} tuples of arguments for {self.world_size} ranks")
        if self._ended:
            raise RankFailure(f"{method.__qualname__}: the ranks have ended")
        messages = [ForkingPickler.dumps((method, arguments)) for arguments in args]  # a method pickles by its qualified name
        for pipe, message in zip(self._pipes, messages, strict=True):
            # On threads: a rank that does not read would hold the driver for ever. One that is gone is met while collecting its answer.
            self._senders.submit(pipe.send_bytes, message)
        return self._collect(method.__qualname__)

    def _collect(self, call: str = "start") -> list[Any]:
        """One answer a rank, or the first failure raised with all ranks ended. `call`: what they were asked for, in messages."""
        answers: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) + len(failures) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in answers and rank not in failures]
            ready = wait(
                [self._pipes[r] for r in waiting] + [self._processes[r].sentinel for r in waiting],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                if not failures:
                    failure = self._silence(waiting, call)
                    failures[failure.rank] = failure
                break
            for rank in waiting:
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    self._receive(rank, answers, failures)
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._kill()
            raise first_cause(list(failures.values()))
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, answers: dict[int, Any], failures: dict[int, Failure]) -> None:
        try:
            if self._pipes[rank].poll():
                ok, value = self._pipes[rank].recv()
                if ok:
                    answers[rank] = value
                else:
                    failures[rank] = value
                return
        except (EOFError, OSError):
            pass
        self._processes[rank].join(timeout=GRACE_S)
        code = self._processes[rank].exitcode
        number = -code if code is not None and code < 0 else 0
        how = words_of_kill(number, self._killed_before, ran_out()) if number else f"exited with code {code}"
        failures[rank] = Failure(rank, f"the process of rank {rank} {how}", signal=number)

    def _silence(self, waiting: list[int], call: str) -> Failure:
        """Whom to blame when nobody answers, with the stacks of all ranks and of the driver."""
        folder = Path(self._stacks.name)
        pids = {rank: process.pid for rank, process in enumerate(self._processes) if process.pid is not None}
        found = {f"rank {rank}": text for rank, text in stacks.of_ranks(pids, folder).items()} | {"driver": stacks.of_this_process(folder)}
        busy = [rank for rank in waiting if not stacks.waits_for_others(found[f"rank {rank}"])]
        others = [rank for rank in waiting if rank not in busy]
        if not busy:
            why = f"ranks {others} all wait in a collective, which is not the same one for all of them, or which has lost its network"
        else:
            why = f"no answer from ranks {busy}" + (f"; ranks {others} wait for them in a collective" if others else "")
        where = "".join(f"\n  {who}: {stacks.in_words(text)}" for who, text in found.items())
        words = f"silent for {self._timeout_s:g} s (runtime.timeout_s) in {call}: {why}\nwhere they stand, innermost first:{where}"
        return Failure((busy or waiting)[0], words, stacks="\n".join(f"== {who}\n{text or 'no answer'}" for who, text in found.items()))

    def close(self) -> None:
        """Let the ranks close by themselves; end those that do not."""
        if self._ended:
            return
        for pipe in self._pipes:
            self._senders.submit(pipe.send, None)
        deadline = time.monotonic() + CLOSE_S
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        self._ended = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        self._senders.shutdown()  # nobody reads any more, so nothing that was being sent holds them
        for pipe in self._pipes:
            pipe.close()
        self._stacks.cleanup()


def _listening_store(timeout_s: float) -> dist.TCPStore:
    """The store by which ranks find each other, on a free port of this machine's loopback alone.

    The system picks the port and the socket holds it: nobody can take it in between. Left to itself the store listens on every interface.
    """
    listener = socket.create_server((env.LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        env.LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


@contextlib.contextmanager
def _out_of_reach() -> Iterator[None]:
    """The server that ranks are forked from starts without SIGTERM: sent to a whole group, it must not end what still has to save."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    pipe: Connection,
    factory: Callable[[RankContext], Any],
    rank: int,
    world_size: int,
    device: str,
    port: int,
    timeout_s: float,
    folder: Path,  # where to say what it is doing, when asked
) -> None:
    """A rank process: build the worker, then answer calls until the driver says None or goes away."""
    faulthandler.enable()  # a crash in C says where
    stacks.register(stacks.file_of(folder, rank))
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group: the driver decides, and closes us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    env.use_loopback_for_collectives()
    try:
        store = dist.TCPStore(env.LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        worker = factory(join(rank, world_size, device, store, timeout_s))
        pipe.send((True, None))
        while (message := pipe.recv()) is not None:
            method, arguments = message
            pipe.send((True, method(worker, *arguments)))
        worker.close()
        dist.destroy_process_group()
    except UserError as error:
        pipe.send((False, Failure(rank, str(error), user_error=True)))
    except EOFError:
        pass  # the driver is gone
    except BaseException as error:  # noqa: BLE001 - fault boundary: the driver raises it
        words = str(error) if isinstance(error, RunError) else traceback.format_exc()  # a RunError says what its reader needs
        pipe.send((False, Failure(rank, words_of_error(error) + words)))
        sys.stdout.flush()
        os._exit(1)  # not sys.exit: a peer may wait for us in a collective, and destructors must not wait for it in turn


def _end_with_driver() -> None:
    """A rank inside a collective does not read its pipe; this thread ends it when the driver dies."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
