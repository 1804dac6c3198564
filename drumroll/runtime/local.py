"""A driver and N rank processes on one machine: typed calls, first failure ends the run, nothing is left running.

`launch` starts one object (made by `factory`) on every rank and gives the driver a handle; `call` runs a method on all of them:

    with launch(factory, Worker, ranks=2) as ranks:
        reports = ranks.call(Worker.push, version)                # the same arguments everywhere
        losses = ranks.scatter(Worker.train, [(a,), (b,)])        # one tuple of arguments a rank

With one rank and `in_process` the object lives in the driver's process, so that a debugger works.

[Note: who fails first] When a rank dies, its peers fail too, a moment later, with a broken collective. The driver therefore waits a
short grace period after the first sign of trouble, collects every failure, and blames in this order: a rank that was killed, a rank whose
error is its own, and last a rank that only lost its peers. When nobody fails and nobody answers, all say where they stand, and the one that
the others wait for is blamed.
"""

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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from drumroll import env
from drumroll.backends.base import RankContext
from drumroll.errors import RunError, UserError
from drumroll.runtime import stacks
from drumroll.runtime.memory import check_processes, ran_out, words_of_error, words_of_kill

GRACE_S = 1.0  # how long peers of a failed rank may take to report their own side
CLOSE_S = 10.0  # how long ranks may take to close by themselves
COLLECTIVE_S = 60.0  # a collective gives up so much later than the driver, who can say more about it


class RankFailure(RunError):
    """A rank raised, ended or fell silent. `stacks`: where all processes stood, when nobody answered."""

    def __init__(self, message: str, stacks: str = "") -> None:
        super().__init__(message)
        self.stacks = stacks


class Closable(Protocol):
    def close(self) -> None: ...


W = TypeVar("W", bound=Closable)
R = TypeVar("R")
P = ParamSpec("P")


class Ranks(AbstractContextManager["Ranks[W]"], Generic[W]):
    """Handle of the objects on all ranks. Calls return one result a rank, in rank order."""

    world_size: int

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method` on every rank with the same arguments."""
        if kwargs:
            raise TypeError("rank calls take positional arguments")
        return self.scatter(method, [args] * self.world_size)

    def scatter(self, method: Callable[..., R], args: Sequence[tuple[Any, ...]]) -> list[R]:
        """Run `method` on every rank, each with its own tuple of arguments."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
    return _Processes(factory, ranks, kind, timeout_s)


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


def _context(rank: int, world_size: int, device: str, store: dist.Store, timeout_s: float) -> RankContext:
    """Join the process group. One thread a rank on a CPU: ranks share the cores."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + COLLECTIVE_S),
    )
    return RankContext(rank=rank, world_size=world_size, device=torch.device(device, rank) if device == "cuda" else torch.device("cpu"))


class _InProcess(Ranks[W]):
    def __init__(self, factory: Callable[[RankContext], W], device: str, timeout_s: float) -> None:
        self.world_size = 1
        self._timeout_s = timeout_s
        self._context = _context(0, 1, device, dist.HashStore(), 600.0)
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


_LOST_PEERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "Socket Timeout",
    "recvBytes",
    "sendBytes",
    "pair closure",
    "remote process exited",
)


@dataclass(slots=True)
class _Failure:
    """One rank's end. `text`: its traceback, or what became of its process."""

    rank: int
    text: str
    user_error: bool = False
    killed: bool = False
    stacks: str = ""

    @property
    def lost_peers(self) -> bool:
        """The error speaks of a broken connection: some other rank failed first."""
        return any(mark in self.text for mark in _LOST_PEERS)

    @property
    def blame(self) -> int:
        return 0 if self.killed else 2 if self.lost_peers else 1


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


class _Processes(Ranks[W]):
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
        failures: dict[int, _Failure] = {}
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
            raise _first_cause(list(failures.values()))
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, answers: dict[int, Any], failures: dict[int, _Failure]) -> None:
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
        killed = code is not None and code < 0
        how = words_of_kill(-code, self._killed_before, ran_out()) if code is not None and killed else f"exited with code {code}"
        failures[rank] = _Failure(rank, f"the process of rank {rank} {how}", killed=killed)

    def _silence(self, waiting: list[int], call: str) -> _Failure:
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
        return _Failure((busy or waiting)[0], words, stacks="\n".join(f"== {who}\n{text or 'no answer'}" for who, text in found.items()))

    def close(self) -> None:
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


@contextlib.contextmanager
def _out_of_reach() -> Iterator[None]:
    """The server that ranks are forked from starts without SIGTERM: sent to a whole group, it must not end what still has to save."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_cause(failures: list[_Failure]) -> Exception:
    """The failure to blame, in words. See [Note: who fails first]."""
    first = min(failures, key=lambda failure: failure.blame)  # ties: the one that came first
    if first.user_error:
        return UserError(first.text)
    others = sorted(failure.rank for failure in failures if failure is not first)
    tail = f"\n(ranks {others} failed after it)" if others else ""
    return RankFailure(f"rank {first.rank} failed first:\n{first.text.rstrip()}{tail}", first.stacks)


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
        worker = factory(_context(rank, world_size, device, store, timeout_s))
        pipe.send((True, None))
        while (message := pipe.recv()) is not None:
            method, arguments = message
            pipe.send((True, method(worker, *arguments)))
        worker.close()
        dist.destroy_process_group()
    except UserError as error:
        pipe.send((False, _Failure(rank, str(error), user_error=True)))
    except EOFError:
        pass  # the driver is gone
    except BaseException as error:  # noqa: BLE001 - fault boundary: the driver raises it
        words = str(error) if isinstance(error, RunError) else traceback.format_exc()  # a RunError says what its reader needs
        pipe.send((False, _Failure(rank, words_of_error(error) + words)))
        sys.stdout.flush()
        os._exit(1)  # not sys.exit: a peer may wait for us in a collective, and destructors must not wait for it in turn


def _end_with_driver() -> None:
    """A rank inside a collective does not read its pipe; this thread ends it when the driver dies."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
