"""One line that shows the progress of a suite while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from accelerate_testing.results import Result

#: Seconds between two lines that don't overwrite each other.
SAY_EVERY = 15.0
#: Number of checks after which the remaining time is estimated.
_ENOUGH = 5


class Progress:
    """Shows which check runs, how long the suite has run, and the estimated remaining time.

    Args:
        total: number of selected checks.
        say: called with the text when it changes, but not more often than every `every` seconds.
    """

    def __init__(self, total: int, say: Callable[[str], None], every: float = 0.0) -> None:
        self.total = total
        self.say = say
        self.every = every
        self.done = 0
        self._said = ""
        self._began = time.monotonic()
        self._said_at = self._began

    def on_run(self, name: str) -> None:
        """Show the running check. Call this several times a second."""
        now = time.monotonic()
        text = self._text(name or "starting", now - self._began)
        if text != self._said and now - self._said_at >= self.every:
            self._said = text
            self._said_at = now
            self.say(text)

    def on_result(self, result: Result) -> None:
        """Count a finished check."""
        self.done += 1

    def _text(self, name: str, seconds: float) -> str:
        left = seconds / self.done * (self.total - self.done) if self.done >= _ENOUGH else 0.0
        guess = f", some {left:.0f} s left" if left else ""
        number = min(self.done + 1, self.total)
        return f"check {number} of {self.total}, {name}, {seconds:.0f} s{guess}"


class Tail:
    """A text after the last line of a terminal, which is erased before anything else is written.

    Args:
        room: number of free columns.
    """

    def __init__(self, file: TextIO, room: int) -> None:
        self.file = file
        self.room = room
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the text shown before."""
        text = text[: max(0, self.room)]
        before = len(self._shown)
        rest = max(0, before - len(text))
        with suppress(OSError, ValueError):  # it is closed
            self.file.write("\b" * before + text + " " * rest + "\b" * rest)
            self.file.flush()
        self._shown = text
