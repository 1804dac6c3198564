"""A rank that fails: its error, what became of its process, and which of several failures was the first.

[Note: who fails first] When a rank dies, its peers fail too, a moment later, with a broken collective. The driver therefore waits a
short grace period after the first sign of trouble, collects every failure, and blames in this order: a rank that was killed, a rank whose
error is its own, one that aborted (so nccl's watchdog ends a rank whose peers are gone), and last a rank that only lost its peers. When
nobody fails and nobody answers, all say where they stand, and the one that the others wait for is blamed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.errors import RunError, UserError


class RankFailure(RunError):
    """A rank raised, ended or fell silent. `stacks`: where all processes stood, when nobody answered."""

    def __init__(self, message: str, stacks: str = "") -> None:
        super().__init__(message)
        self.stacks = stacks


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
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
)


@dataclass(slots=True)
class Failure:
    """One rank's end. `text`: its traceback, or what became of its process."""

    rank: int
    text: str
    user_error: bool = False
    signal: int = 0  # that ended the process; 0: none
    stacks: str = ""

    @property
    def lost_peers(self) -> bool:
        """The error speaks of a broken connection: some other rank failed first."""
        return any(mark in self.text for mark in _LOST_PEERS)

    @property
    def blame(self) -> int:
        """The lower, the sooner it is to blame."""
        if self.signal:
            return 2 if self.signal == signal.SIGABRT else 0
        return 3 if self.lost_peers else 1


def first_cause(failures: Sequence[Failure]) -> Exception:
    """The failure to blame, in words. See [Note: who fails first]."""
    first = min(failures, key=lambda failure: failure.blame)  # ties: the one that came first
    if first.user_error:
        return UserError(first.text)
    others = sorted(failure.rank for failure in failures if failure is not first)
    tail = f"\n(ranks {others} failed after it)" if others else ""
    return RankFailure(f"rank {first.rank} failed first:\n{first.text.rstrip()}{tail}", first.stacks)
