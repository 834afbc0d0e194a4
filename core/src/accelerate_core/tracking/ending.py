"""Close the runs when a script ends without saying so: as failed if it raised."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from accelerate_core import crash

__all__ = ["watch"]


class Closes(Protocol):
    """What can be closed."""

    def finish(self, failed: bool = False) -> None:
        """Deliver what is left and close; a second call does nothing."""


def watch(hub: Closes) -> Callable[[], None]:
    """Have `finish` called at the end of the script; return what takes that back."""
    me = weakref.ref(hub)

    def raised() -> None:
        hub = me()
        if hub is not None:
            with _undisturbed():
                hub.finish(failed=True)

    def ended() -> None:
        hub = me()
        if hub is not None:
            hub.finish(failed=crash.happened())

    crash.listen(raised)
    atexit.register(ended)

    def forget() -> None:
        crash.forget(raised)
        atexit.unregister(ended)

    return forget


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let the launcher, which ends the other ranks once one has failed, wait for the last flush."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
