"""A verb that raises, with the check in which it did."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from drumroll.errors import RunError


class CheckError(RunError):
    """A verb raised; the text has the check in brackets, see `failed_check`."""


def failed_check(text: str) -> tuple[str, str] | None:
    """(check, first line of the error) of a rank's failure that is a CheckError; None for any other text."""
    found = re.findall(r"^check \[(.+?)\] (.*)$", text, re.MULTILINE)
    return found[-1] if found else None


@contextmanager
def checking(check: str) -> Iterator[None]:
    """Name the check in whatever is raised inside."""
    try:
        yield
    except CheckError:
        raise
    except Exception as error:
        raise check_error(check, error) from error


def check_error(check: str, error: Exception) -> CheckError:
    """With the first line of the error."""
    text = str(error).strip() or "no text"
    return CheckError(f"check [{check}] {type(error).__name__}: {text.splitlines()[0]}")
