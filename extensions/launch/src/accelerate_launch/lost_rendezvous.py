"""End an agent whose rendezvous has stopped to answer: torch's would wait for it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

#: Seconds without an answer after which an agent whose ranks have ended gives up.
PATIENCE = 15.0
#: The same while the agent ends, or waits for other machines beyond its own time limit.
LONG_PATIENCE = 60.0


class LostRendezvous:
    """Watches that the agent's loop comes round, which asks the store on machine 0 each time.

    A cut link leaves the connection open and silent. The ranks have time limits of their own and
    end by them; then nobody is left who would notice that the agent waits.
    """

    def __init__(self, where: str, leave: Callable[[int], Any] = os._exit) -> None:
        self.where = where
        self._leave = leave
        self._changed = threading.Condition()
        self._since: float | None = None
        self._limit: float | None = None
        threading.Thread(target=self._watch, name="accelerate-lost", daemon=True).start()

    def waiting(self, limit: float | None = None) -> None:
        """The agent is about to ask the store; without a limit as long as its ranks live."""
        with self._changed:
            self._since = time.monotonic()
            self._limit = limit
            self._changed.notify()

    def answered(self) -> None:
        """The agent goes on."""
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
            f"\nError: the rendezvous at {self.where} has not answered for {silent:.0f} s: that "
            "machine is gone, or the link to it is cut. The processes of this machine are ended.\n"
        )
        sys.stderr.flush()
        for rank in _ranks():
            rank.kill()
        self._leave(1)


def _ranks() -> list[psutil.Process]:
    return psutil.Process().children()


def _a_rank_has_ended() -> bool:
    return any(rank.status() == psutil.STATUS_ZOMBIE for rank in _ranks())
