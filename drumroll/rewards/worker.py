"""The process in which reward functions run that may hang: `python -m drumroll.rewards.worker FD`, started by `pool.py`.

It talks pickles over a socket that it inherits: first (sys.path, [(fn, args), ...]), then one (function, arguments) after the other; it
answers each with `Outcome`. End of file means that the driver is gone or done. Nothing here imports torch: a worker starts in the time that
its functions take to import. (What is sent is defined in `call.py`: this module is called `__main__` where it runs.)
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from drumroll.rewards.call import Call, judged
from drumroll.rewards.lookup import resolve


def main(descriptor: int) -> None:
    """Serve calls that arrive on an inherited pipe until it closes; a call that outlives its limit ends the process."""
    # With the default action the kernel ends the process whatever it is doing: an orphan that spins does not outlive its limit by much.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    connection = Connection(descriptor)
    try:
        sys.path[:], specifications = connection.recv()
        functions = [resolve(fn, args) for fn, args in specifications]
        connection.send("ready")
        while True:
            call: Call = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, 2 * call.limit_s + 5)
            outcome = judged(functions[call.function], call.args, call.count)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(outcome)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # not sys.exit: threads that a reward function left running must not keep the process


if __name__ == "__main__":
    main(int(sys.argv[1]))
