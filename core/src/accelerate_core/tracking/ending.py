"""Close the runs when a script ends without saying so: as failed if it raised."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from accelerate_core import crash

__all__ = ["TooLongError", "forbid_in_children", "limited", "watch"]


class TooLongError(TimeoutError):
    """A call did not come back in time."""


def limited(function: Callable[[], object], seconds: float, name: str) -> None:
    """Call a function in a thread of its own, and wait for it no longer than this.

    Raises:
        TooLongError: it is still under way; the thread dies with the process.
        Exception: what it raised.
    """
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and takes no thread any more
        function()
        return
    thread.join(seconds)
    if thread.is_alive():
        raise TooLongError(f"it was not done after {seconds:.0f} s")
    if raised:
        raise raised[0]


class Forks(Protocol):
    """What a forked child must not touch."""

    def forked(self) -> None:
        """Let go of what belongs to the parent."""


def forbid_in_children(hub: Forks) -> None:
    """Have `forked` called in a child made by `os.fork`: the run is its parent's."""
    me = weakref.ref(hub)

    def in_child() -> None:
        hub = me()
        if hub is not None:
            hub.forked()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)


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
            hub.finish(failed=crash.failing())

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
