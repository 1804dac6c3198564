"""A pool of processes that can be killed: a call over its limit ends with its worker, and a new worker takes the place.

Threads cannot be killed and `concurrent.futures` waits for the hung worker when it closes; a signal timer works in the main thread only and
never inside a long C call. SIGKILL to the worker's process group always works, and takes along what the worker itself has started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from drumroll.errors import RunError
from drumroll.rewards.call import Call, Outcome

START_S = 120.0  # imports on a busy machine
STARTS_IN_A_ROW = 3  # workers that may die while they start, before the run ends


class Worker:
    """One process and the call it is working on."""

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Its standard output is our standard error: what reward functions print must not mix with what drumroll prints.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "drumroll.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.connection.send((sys.path, [(fn, dict(args)) for fn, args in functions]))
        self.ready = False
        self.call: int | None = None
        self.deadline = time.monotonic() + START_S

    @property
    def pid(self) -> int:
        return self._process.pid

    def assign(self, index: int, call: Call) -> None:
        """Send a call; the worker has until `deadline` to answer."""
        self.call = index
        self.deadline = time.monotonic() + call.limit_s
        self.connection.send(call)

    def receive(self) -> Any:
        """What the worker sent; raises EOFError or ConnectionError when it is dead."""
        return self.connection.recv()

    def reap(self) -> None:
        """Let a process that has hung up end by itself, so that its exit status is its own and not that of our kill."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)

    def kill(self) -> int:
        """End the process and all that it started; returns its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        return self._process.wait()


class WorkerPool:
    """Runs calls of a fixed list of functions in `size` processes. Starting returns at once: imports go on behind it."""

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], size: int) -> None:
        self._functions = list(functions)
        self._failed_starts = 0
        self._workers = [Worker(self._functions) for _ in range(size)]

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """The outcome of every call, in order. Raises RunError when workers cannot start."""
        waiting = deque(enumerate(calls))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(calls):
            for worker in self._workers:
                if worker.ready and worker.call is None and waiting and self._assign(worker, waiting[0]):
                    waiting.popleft()
            busy = [worker for worker in self._workers if worker.call is not None or not worker.ready]
            left = min(worker.deadline for worker in busy) - time.monotonic()
            heard = wait([worker.connection for worker in busy], timeout=max(0.0, left))
            for worker in busy:
                if worker.connection in heard:
                    self._hear(worker, outcomes)
                elif time.monotonic() >= worker.deadline:
                    self._end(worker, outcomes, calls)
        return [outcomes[index] for index in range(len(calls))]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers; none is waited for longer than the kernel needs to kill it."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _assign(self, worker: Worker, item: tuple[int, Call]) -> bool:
        try:
            worker.assign(*item)
        except ConnectionError:  # it died while it had nothing to do, so no call is to blame
            self._replace(worker)
            return False
        return True

    def _hear(self, worker: Worker, outcomes: dict[int, Outcome]) -> None:
        try:
            message = worker.receive()
        except (EOFError, ConnectionError):
            worker.reap()
            index, status = worker.call, self._replace(worker)
            if index is None:
                self._start_failed(status)
            else:
                outcomes[index] = Outcome("failed", detail=f"its process ended with exit status {status}")
            return
        if worker.ready:
            assert worker.call is not None
            outcomes[worker.call] = message
        worker.ready, worker.call, self._failed_starts = True, None, 0

    def _end(self, worker: Worker, outcomes: dict[int, Outcome], calls: Sequence[Call]) -> None:
        index, status = worker.call, self._replace(worker)
        if index is None:
            self._start_failed(status)
        else:
            outcomes[index] = Outcome("timeout", detail=f"over {calls[index].limit_s:g} s")

    def _replace(self, worker: Worker) -> int:
        status = worker.kill()
        self._workers[self._workers.index(worker)] = Worker(self._functions)
        return status

    def _start_failed(self, status: int) -> None:
        self._failed_starts += 1
        if self._failed_starts >= STARTS_IN_A_ROW:
            names = ", ".join(fn for fn, _ in self._functions)
            raise RunError(f"reward workers for {names} do not start (exit status {status}): what they wrote above says why")
