"""One item ahead: the next one is made on a thread while the caller works on this one."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["OneAhead"]

T = TypeVar("T")


class OneAhead(Generic[T]):
    """Calls `make` on a thread of its own, one call at a time, one result ahead.

    After each result the thread calls `then`, which must not raise: to get ready for the next.

    `start` asks for the next result, `take` waits for it. `close` waits for what was started, so
    that nothing is under way afterwards, and ends the thread. The thread is a daemon: a run that
    dies does not wait for it.
    """

    def __init__(self, make: Callable[[], T], name: str, then: Callable[[], None]) -> None:
        self._make = make
        self._then = then
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[T], threading.Event] | None]
        self._jobs = queue.SimpleQueue()
        self._pending: Future[T] | None = None
        self._idle: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to make the next result."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._pending, self._idle = Future(), threading.Event()
        self._jobs.put((self._pending, self._idle))

    @property
    def started(self) -> bool:
        """Whether a result was started and not taken."""
        return self._pending is not None

    def take(self) -> T:
        """Return the result that was started; raise what making it raised."""
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending.result()

    def rest(self) -> None:
        """Wait until the thread does nothing: what it uses may be used by the caller then."""
        if self._idle is not None:
            self._idle.wait()

    def close(self) -> None:
        """Wait for what was started, drop it, and end the thread."""
        pending, self._pending = self._pending, None
        if self._thread is None or sys.is_finalizing():  # the thread runs no more by then
            return
        self._jobs.put(None)
        if pending is not None:
            pending.exception()
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, idle = job
            try:
                result.set_result(self._make())
            except BaseException as error:
                result.set_exception(error)
            del job, result  # do not keep a batch alive while waiting
            try:
                self._then()
            finally:
                idle.set()
