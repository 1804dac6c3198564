"""A run whose ranks fail goes on from its last valid checkpoint by itself, as often as `runtime.max_restarts` allows.

A restart is what `--resume` would do, without leaving the process: the same checks, the records cut back, the steps since the checkpoint
done again with the same numbers. What is the user's to mend (UserError, a checkpoint that cannot be written) is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable

from drumroll.config import RunConfig
from drumroll.errors import UserError
from drumroll.pipelines.resume import Resumed, find
from drumroll.runtime.failure import RankFailure

Attempt = Callable[[Resumed | None, str], None]  # where it goes on from; which restart this is and why, or nothing


def with_restarts(attempt: Attempt, config: RunConfig, resumed: Resumed | None) -> None:
    """Run `attempt` until it ends, or its ranks have failed once more than they may."""
    allowed, restart = config.runtime.max_restarts, ""
    for number in range(1, allowed + 1):
        try:
            attempt(resumed, restart)
            return
        except RankFailure as failure:
            restart = f"restart {number} of at most {allowed} (runtime.max_restarts): {failure}"
            print(f"the ranks failed: restart {number} of at most {allowed}")
            try:
                resumed = find(config, None)
            except UserError as error:
                raise RankFailure(f"{failure}\nno restart: {error}", failure.stacks) from error
            print(resumed.words() if resumed is not None else "no checkpoint yet: starting from the beginning")
    attempt(resumed, restart)
