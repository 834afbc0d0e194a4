"""One save at a time, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from accelerate_checkpoint.staging import Staging

__all__ = ["Background"]


class Background:
    """The save that is under way, its copies of the state, and what its threads talk over."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._collectives: Any = None

    def open(self, collectives: Any) -> Any:
        """Return collectives for the ranks' threads; None where they cannot have any."""
        if self._collectives is None:
            self._collectives = collectives.duplicate()
        return self._collectives

    def run(self, job: Callable[[], None]) -> None:
        """Start a job; it ends before the process does."""

        def work() -> None:
            try:
                job()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="save_state")
        self._thread.start()

    def wait(self) -> None:
        """Return when the save under way is complete; raise what it failed with, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
