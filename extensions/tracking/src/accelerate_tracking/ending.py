"""Close the runs when a script ends without `end_training`, as failed if it raised."""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from accelerate_core.plugin import is_failure


class TooLongError(TimeoutError):
    """A call did not return in time."""


def limited(function: Callable[[], object], seconds: float, name: str) -> None:
    """Call a function in a new thread, and wait for it for a limited time.

    Raises:
        TooLongError: it has not returned. The thread ends with the process.
        Exception: the function raised it.
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
    except RuntimeError:  # the interpreter is exiting and starts no more threads
        function()
        return
    thread.join(seconds)
    if thread.is_alive():
        raise TooLongError(f"it did not finish within {seconds:.0f} s")
    if raised:
        raise raised[0]


def watch(finish: Callable[[bool], None]) -> Callable[[], None]:
    """Call a method at the end of the script, with True if the script failed.

    Only a weak reference to the method is kept. Returns a function that undoes this.

    Our hook for uncaught exceptions runs before those installed earlier. Libraries that close
    their runs in such a hook would otherwise do so before all queued values have arrived. There is
    no hook for `sys.exit`, so the function itself is wrapped to see the exit status.
    """
    method = weakref.WeakMethod(finish)
    code: object = None
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def raised(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        close = method()
        if close is not None:
            try:
                with _undisturbed():
                    close(True)
            except Exception as problem:
                sys.stderr.write(f"Closing the trackers after the failure failed: {problem}\n")
        previous_hook(kind, error, trace)

    @functools.wraps(previous_exit)
    def exiting(status: Any = None, /) -> NoReturn:
        nonlocal code
        if threading.current_thread() is threading.main_thread():
            code = status
        previous_exit(status)

    def ended() -> None:
        close = method()
        if close is not None:
            close(is_failure(SystemExit(code)))

    def forget() -> None:
        atexit.unregister(ended)
        # If something else has wrapped them since, they stay in place and do nothing.
        if sys.excepthook is raised:
            sys.excepthook = previous_hook
        if sys.exit is exiting:
            sys.exit = previous_exit

    sys.excepthook = raised
    sys.exit = exiting
    atexit.register(ended)
    return forget


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGTERM, which the launcher sends when a rank fails, until the last flush is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
