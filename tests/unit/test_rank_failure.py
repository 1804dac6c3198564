"""Which of several failing ranks is blamed. Failure cases of ranks that die together."""

import signal
from itertools import permutations

import pytest

from drumroll.errors import UserError
from drumroll.runtime.failure import Failure, first_cause

KILLED = Failure(0, "the process of rank 0 was killed by SIGKILL", signal=signal.SIGKILL)
OWN_ERROR = Failure(1, "Traceback ...\nValueError: a bad reward")
ABORTED = Failure(2, "the process of rank 2 was killed by SIGABRT", signal=signal.SIGABRT)
LOST = Failure(3, "RuntimeError: Connection closed by peer [127.0.0.1]")
LOST_ON_A_GPU = Failure(4, "DistBackendError: NCCL communicator was aborted on rank 4")


@pytest.mark.parametrize("order", list(permutations((KILLED, OWN_ERROR, ABORTED, LOST))))
def test_who_is_blamed_does_not_depend_on_who_is_heard_first(order: tuple[Failure, ...]) -> None:
    failures = list(order)
    for first in (KILLED, OWN_ERROR, ABORTED, LOST):
        assert str(first_cause(failures)).startswith(f"rank {first.rank} failed first:\n{first.text}")
        failures.remove(first)


def test_nccl_that_gives_up_has_lost_a_peer() -> None:
    assert str(first_cause([LOST_ON_A_GPU, OWN_ERROR])).startswith("rank 1 failed first")
    assert isinstance(first_cause([LOST_ON_A_GPU, Failure(0, "model.path: no such folder", user_error=True)]), UserError)
