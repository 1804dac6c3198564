"""What a reward function raised, for the person who wrote it: a line for the message, a traceback of their own code for the records."""

from __future__ import annotations

import traceback
from pathlib import Path

from drumroll.errors import RunError

OURS = frozenset(str(Path(__file__).with_name(name)) for name in ("call.py", "base.py", "adapters.py"))  # what calls the function


class RewardFailure(RunError):
    """A function came to an end for none of the responses. `trace`: the traceback of its first failure, or what there is of one."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


def in_a_line(error: BaseException) -> str:
    """`KeyError: 'x' at my_rewards.py:3, in score`: the last line of the function's own file on the way to the error."""
    lines = traceback.format_exception_only(error)  # of a SyntaxError first where it is, of others last the notes
    said = " ".join(lines[-1 if isinstance(error, SyntaxError) else 0].split())
    frames = _frames(error)
    if not frames:
        return said
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{said} at {_shown(last.filename)}:{last.lineno}, in {last.name}"


def trace(error: BaseException) -> str:
    """The traceback without our part of it, which leads up to the function; whole, where there is no other."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(_frames(error)) or told.stack
    return "".join(told.format())


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if frame.filename in OURS]
    return list(frames[ours[-1] + 1 :]) if ours else list(frames)


def _shown(filename: str) -> str:
    """From the working directory, where it is below."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
