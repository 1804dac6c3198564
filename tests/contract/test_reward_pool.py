"""Killable reward processes: a hang costs its limit and its own verdict, nothing else, and leaves nothing behind (cases 62 and 63)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumroll.config import RewardConfig
from drumroll.errors import RunError
from drumroll.rewards.base import FunctionCounts, RewardSet
from drumroll.rewards.call import Call, Outcome
from drumroll.rewards.math import math as math_reward
from drumroll.rewards.pool import WorkerPool
from drumroll.types import Group, Prompt, Rollout

HERE = __file__
PAIRS = [
    ("72", r"\boxed{72}", 1.0),
    ("72", r"\boxed{71}", 0.0),
    ("0.5", r"\boxed{\frac12}", 1.0),
    ("x+y=3", "2x+y=3", 0.0),
    (r"\pi/2", "pi/2", 1.0),
]
LIMIT_S = 1.0
SLACK_S = 2.0  # the batch may end this long after the limit

pytestmark = pytest.mark.timeout(120)


def rollout(answer: str) -> Rollout:
    return Rollout(0, [7], [0.0], 0, "stop", answer)


def groups(*pairs: tuple[str, str]) -> list[Group]:
    return [Group(Prompt(i, f"r:{i}", "", [1], {"answer": gold}), [rollout(response)]) for i, (gold, response) in enumerate(pairs)]


def rewards_of(scored: list[Group]) -> list[float | None]:
    return [r.reward for g in scored for r in g.rollouts]


# Reward functions that the workers load from this file.


def obey(rollout: Rollout, prompt: Any) -> float | None:
    """Does what the response says."""
    match rollout.text.split():
        case ["spin"]:
            while True:
                pass
        case ["sleep"]:
            time.sleep(1000)
        case ["c-call"]:  # holds the interpreter: no thread and no signal handler in the process could stop it
            return float(len(str(7 ** (10**9))))
        case ["child", pid_file]:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(pid_file).write_text(str(child.pid))
            time.sleep(1000)
        case ["fork", pid_file]:  # a child, and a child of it
            os.fork()
            os.fork()
            with Path(pid_file).open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(1000)
        case ["flood"]:
            for _ in range(1 << 10):
                print("x" * (1 << 10), flush=True)
            time.sleep(1000)
        case ["read"]:
            return float(len(input()))  # there is nothing to read
        case ["quit"]:
            sys.exit(0)
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["exit"]:
            os._exit(3)
        case ["raise"]:
            raise ValueError("no verdict from me")
        case ["print"]:
            print("to standard output")
        case ["pid"]:
            return float(os.getpid())
    return 1.0


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not left, left


def warm(rewards: RewardSet) -> None:
    """Wait until the workers have imported what they need: start-up is not what the limits are about."""
    rewards.score(groups(*[("1", "1")] * 8))


@pytest.mark.parametrize("hang", ["spin", "sleep", "c-call"])
def test_case_63_a_batch_of_8_with_one_hang(hang: str) -> None:
    with RewardSet([RewardConfig(fn=f"{HERE}:obey", timeout_s=LIMIT_S)], workers=2) as rewards:
        warm(rewards)
        batch = groups(*[("", "go")] * 3, ("", hang), *[("", "go")] * 4)
        begin = time.monotonic()
        counts = rewards.score(batch)
        took = time.monotonic() - begin
        assert LIMIT_S <= took < LIMIT_S + SLACK_S
        assert rewards_of(batch) == [1, 1, 1, None, 1, 1, 1, 1]
        assert counts.functions[f"{HERE}:obey"] == FunctionCounts(verdicts=7, abstained=0, timed_out=1, failed=0)
        again = groups(*[("", "pid")] * 64)  # the pool is full again
        assert rewards.score(again).without_verdict == 0
        assert len(rewards.pids) == 2 and all(psutil.pid_exists(pid) for pid in rewards.pids)


def test_case_63_every_worker_hangs_again_and_again() -> None:
    """More hangs than workers: each costs its limit, shared out over the workers, and the rest is scored."""
    with RewardSet([RewardConfig(fn=f"{HERE}:obey", timeout_s=0.3)], workers=2) as rewards:
        batch = groups(*[("", "spin"), ("", "go")] * 3)
        counts = rewards.score(batch)
        assert rewards_of(batch) == [None, 1] * 3
        assert counts.functions[f"{HERE}:obey"].timed_out == 3


def test_case_63_maths_that_never_ends() -> None:
    with RewardSet([RewardConfig(fn="math", timeout_s=3.0)], workers=2) as rewards:
        warm(rewards)
        batch = groups(*[(gold, response) for gold, response, _ in PAIRS], ("1", r"\boxed{9^{9^{9^{9}}}}"))
        begin = time.monotonic()
        rewards.score(batch)
        assert time.monotonic() - begin < 3.0 + SLACK_S
    assert rewards_of(batch) == [*(verdict for _, _, verdict in PAIRS), None]


def test_case_63_a_back_tracking_regex() -> None:
    with RewardSet([RewardConfig(fn="format", args={"pattern": "(a+)+b"}, timeout_s=LIMIT_S)], workers=2) as rewards:
        warm(rewards)
        batch = groups(("", "aab"), ("", "a" * 64), ("", "b"))
        rewards.score(batch)
    assert rewards_of(batch) == [1.0, None, 0.0]


def test_case_62_the_same_verdicts_in_the_main_thread_a_thread_and_a_process() -> None:
    """Never a silent 0 for all: math-verify's own timers fail off the main thread."""

    def directly() -> list[float | None]:
        return [math_reward(rollout(response), Prompt(0, "", "", [1], {"answer": gold})) for gold, response, _ in PAIRS]

    def pooled() -> list[float | None]:
        batch = groups(*[(gold, response) for gold, response, _ in PAIRS])
        with RewardSet([RewardConfig(fn="math")], workers=2) as rewards:
            rewards.score(batch)
        return rewards_of(batch)

    right = [verdict for _, _, verdict in PAIRS]
    found: list[list[float | None]] = []
    threads = [threading.Thread(target=lambda f=f: found.append(f())) for f in (directly, pooled)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [directly(), pooled(), *found] == [right] * 4


def test_what_a_hung_function_has_started_is_killed_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with RewardSet([RewardConfig(fn=f"{HERE}:obey", timeout_s=LIMIT_S)], workers=1) as rewards:
        warm(rewards)
        rewards.score(groups(("", f"child {pid_file}"), ("", "go")))
        deadline = time.monotonic() + 5
        while psutil.pid_exists(int(pid_file.read_text())) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _runs(int(pid_file.read_text()))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # not our child: init reaps it when it likes
    except psutil.NoSuchProcess:
        return False


def test_case_66_twenty_time_outs_leave_nothing(tmp_path: Path) -> None:
    """Loops, forks and floods of output end with their limit; reads of input and exits fail at once. No zombie, no survivor."""
    forked = tmp_path / "pids"
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # of tests before this one
    with RewardSet([RewardConfig(fn=f"{HERE}:obey", timeout_s=0.5)], workers=2) as rewards:
        warm(rewards)
        held: list[int] = []
        for _ in range(5):
            batch = groups(("", f"fork {forked}"), ("", "spin"), ("", "flood"), ("", "sleep"), ("", "read"), ("", "quit"), ("", "go"))
            counts = rewards.score(batch).functions[f"{HERE}:obey"]
            assert (counts.timed_out, counts.failed, counts.verdicts) == (4, 2, 1)
            assert rewards_of(batch) == [*[None] * 6, 1.0]
            held.append(psutil.Process().memory_info().rss)
        below = {process.pid for process in psutil.Process().children(recursive=True)} - others
        assert sorted(below) == sorted(rewards.pids)  # a zombie would be one of them
        started = [int(pid) for pid in forked.read_text().split()]
        assert len(started) == 5 * 4
        assert [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE] == []
        assert held[-1] - held[0] < 16 << 20


def test_a_worker_that_dies_is_a_failure_of_its_call_alone() -> None:
    with RewardSet([RewardConfig(fn=f"{HERE}:obey")], workers=2) as rewards:
        batch = groups(("", "go"), ("", "die"), ("", "raise"), ("", "print"))
        counts = rewards.score(batch)
    assert rewards_of(batch) == [1, None, None, 1]
    assert counts.functions[f"{HERE}:obey"] == FunctionCounts(2, 0, 0, failed=2)


def test_a_worker_that_died_idle_is_replaced_and_no_call_is_blamed() -> None:
    with RewardSet([RewardConfig(fn=f"{HERE}:obey")], workers=2) as rewards:
        warm(rewards)
        killed = rewards.pids[0]
        os.kill(killed, signal.SIGKILL)
        while _runs(killed):
            time.sleep(0.01)
        assert rewards.score(groups(*[("", "go")] * 8)).without_verdict == 0
        assert killed not in rewards.pids


def test_outcomes_come_in_the_order_of_the_calls_and_with_their_reason() -> None:
    pool = WorkerPool([(f"{HERE}:obey", {})], 2)
    try:
        prompt = Prompt(0, "", "", [1], {})
        found = pool.run([Call(0, (rollout(text), prompt), 1, LIMIT_S) for text in ("go", "spin", "raise", "die", "exit", "go")])
    finally:
        pool.close()
    assert [o.kind for o in found] == ["value", "timeout", "failed", "failed", "failed", "value"]
    assert found[0] == Outcome("value", (1.0,)) and found[1].detail == "over 1 s"
    assert "ValueError: no verdict from me at " in found[2].detail and "in obey" in found[2].trace and "exit status -9" in found[3].detail
    assert "exit status 3" in found[4].detail


def test_workers_that_cannot_start_end_the_run() -> None:
    pool = WorkerPool([(f"{HERE}:no_such_function", {})], 1)
    try:
        with pytest.raises(RunError, match="do not start"):
            pool.run([Call(0, (rollout(""), None), 1, 1.0)])
    finally:
        pool.close()


def test_a_driver_that_is_killed_leaves_no_worker() -> None:
    """Idle workers see the end of the socket; a spinning one is ended by the kernel's timer."""
    script = f"""
import sys, threading, time
from drumroll.config import RewardConfig
from drumroll.rewards.base import RewardSet
from drumroll.types import Group, Prompt, Rollout
def scored(text): return [Group(Prompt(0, "", "", [1], {{}}), [Rollout(0, [1], [0.0], 0, "stop", text)])]
rewards = RewardSet([RewardConfig(fn="{HERE}:obey", timeout_s=0.5)], workers=2)
rewards.score(scored("go"))
print(*rewards.pids, flush=True)
from drumroll.rewards.call import Call
prompt = Prompt(0, "", "", [1], {{}})
for worker in rewards._pool._workers[:1]:
    while not worker.ready: worker.ready = worker.receive() == "ready"
    worker.assign(0, Call(0, (Rollout(0, [1], [0.0], 0, "stop", "spin"), prompt), 1, 0.5))
print("spinning", flush=True)
time.sleep(1000)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2 and driver.stdout.readline() == "spinning\n"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 2 * 0.5 + 5 + 5
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))
