"""Ctrl-C and SIGTERM of a run: while it trains they are a request to save and end, at any other time they end it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_WORDS = b"\nstopping: the run saves a checkpoint at the next place where it can, then ends; once more ends it at once\n"


class Signals:
    """`requested` is set by the first signal inside `deferred`; a second one, or one outside, raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals inside the block. In the main thread."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block the first signal only sets `requested`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, _WORDS)  # not print: this may have come in the middle of one
