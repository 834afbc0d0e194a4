"""One line that tells where a suite is while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from accelerate_testing.results import Result

#: Seconds between two lines where they do not overwrite each other.
SAY_EVERY = 15.0
#: Checks after which it can be guessed how long the others take.
_ENOUGH = 5


class Progress:
    """Tells which check of how many runs, for how long that has been, and what may be left.

    Args:
        total: checks that were chosen.
        say: told the text: each time it is another one, or every `every` seconds.
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
        """Tell of the check that runs; to be called several times a second."""
        now = time.monotonic()
        text = self._text(name or "starting", now - self._began)
        if text != self._said and now - self._said_at >= self.every:
            self._said = text
            self._said_at = now
            self.say(text)

    def on_result(self, result: Result) -> None:
        """Count a check that has ended."""
        self.done += 1

    def _text(self, name: str, seconds: float) -> str:
        left = seconds / self.done * (self.total - self.done) if self.done >= _ENOUGH else 0.0
        guess = f", some {left:.0f} s left" if left else ""
        number = min(self.done + 1, self.total)
        return f"check {number} of {self.total}, {name}, {seconds:.0f} s{guess}"


class Tail:
    """A text behind what stands in the last line of a terminal, taken back before anybody goes on there.

    Args:
        room: columns there are.
    """

    def __init__(self, file: TextIO, room: int) -> None:
        self.file = file
        self.room = room
        self._shown = ""

    def show(self, text: str) -> None:
        """Put a text in the place of the one before."""
        text = text[: max(0, self.room)]
        before = len(self._shown)
        rest = max(0, before - len(text))
        with suppress(OSError, ValueError):  # it is closed
            self.file.write("\b" * before + text + " " * rest + "\b" * rest)
            self.file.flush()
        self._shown = text
