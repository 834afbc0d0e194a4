"""One save at a time, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate_core.checkpoint.staging import Staging
from accelerate_core.torch_talk import gather_objects

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["Background"]


class Background:
    """The save that is under way, its copies of the state, and the ranks' group for it."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._gather: Callable[[Any], list[Any]] | None = None

    def open(self, accelerator: Accelerator) -> Callable[[Any], list[Any]] | None:
        """Return how the ranks' threads exchange objects; None where they cannot."""
        if self._gather is None:
            comm = accelerator.communicator
            group = comm.open_group()
            if comm.size == 1:
                self._gather = _alone
            elif group is not None:
                self._gather = lambda obj: gather_objects(obj, group)
        return self._gather

    def run(self, job: Callable[[], None]) -> None:
        """Start a job; it ends before the process does."""

        def work() -> None:
            try:
                job()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="save_state")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when the save under way is complete; raise what it failed with, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _alone(obj: Any) -> list[Any]:
    return [obj]
