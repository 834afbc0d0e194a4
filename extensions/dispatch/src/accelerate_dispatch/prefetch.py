"""Read on a background thread, one result ahead of the caller."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Prefetcher:
    """Calls `make` on a background thread, one call at a time, one result ahead.

    After each result the thread calls `then`, which prepares the next one and must not raise.

    `start` requests the next result and `take` waits for it. `close` waits for a requested result,
    drops it and ends the thread. The thread is a daemon, so a crashed run does not wait for it.
    """

    def __init__(self, make: Callable[[], Any], then: Callable[[], None]) -> None:
        self._make = make
        self._then = then
        self._jobs: queue.Queue[Future[Any] | None] = queue.Queue()
        self._pending: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to make the next result."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)
            self._thread.start()
        self._pending = Future()
        self._jobs.put(self._pending)

    def take(self) -> Any:
        """Return the result that was started, or make it now; re-raise the exception of `make`."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            return pending.result()
        self.rest()
        return self._make()

    def rest(self) -> None:
        """Wait until the thread is idle, so that the caller may use the same objects."""
        self._jobs.join()

    def close(self) -> None:
        """Wait for a result that was started, drop it, and end the thread."""
        self._pending = None
        if self._thread is None or sys.is_finalizing():  # daemon threads have stopped by then
            return
        self._jobs.put(None)
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            result = self._jobs.get()
            if result is None:
                break
            try:
                result.set_result(self._make())
            except BaseException as error:
                result.set_exception(error)
            del result  # do not keep a batch alive while waiting
            try:
                self._then()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()
