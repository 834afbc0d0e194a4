"""Stop an agent whose rendezvous no longer answers, because torch's agent would wait forever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

#: An agent whose ranks have ended gives up after this many seconds without an answer.
PATIENCE = 15.0
#: The same limit while the agent exits, or waits for other machines beyond its own time limit.
LONG_PATIENCE = 60.0


class LostRendezvous:
    """Watches that the agent's loop keeps running; each round asks the store on machine 0.

    If the network link is cut, the connection stays open but silent. The ranks exit at their own
    time limits, but the agent would keep waiting.
    """

    def __init__(self, where: str, leave: Callable[[int], Any] = os._exit) -> None:
        self.where = where
        self._leave = leave
        self._changed = threading.Condition()
        self._since: float | None = None
        self._limit: float | None = None
        threading.Thread(target=self._watch, name="accelerate-lost", daemon=True).start()

    def waiting(self, limit: float | None = None) -> None:
        """Call this before the agent asks the store. Without a limit, it may wait while ranks run."""
        with self._changed:
            self._since = time.monotonic()
            self._limit = limit
            self._changed.notify()

    def answered(self) -> None:
        """Call this when the store has answered."""
        with self._changed:
            self._since = None
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._since is None:
                    self._changed.wait()
                    continue
                silent = time.monotonic() - self._since
                patience = PATIENCE if self._limit is None else self._limit
                if silent < patience:
                    self._changed.wait(patience - silent)
                elif self._limit is None and not _a_rank_has_ended():
                    self._changed.wait(2.0)
                else:
                    self._give_up(silent)
                    return

    def _give_up(self, silent: float) -> None:
        sys.stderr.write(
            f"\nError: the rendezvous at {self.where} has not answered for {silent:.0f} s. That "
            "machine is down, or the network link to it is cut. Stopping the processes on this "
            "machine.\n"
        )
        sys.stderr.flush()
        for rank in _ranks():
            rank.kill()
        self._leave(1)


def _ranks() -> list[psutil.Process]:
    return psutil.Process().children()


def _a_rank_has_ended() -> bool:
    return any(rank.status() == psutil.STATUS_ZOMBIE for rank in _ranks())
