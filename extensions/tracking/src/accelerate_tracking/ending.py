"""Close the runs when a script ends without saying so: as failed if it raised."""

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


def watch(finish: Callable[[bool], None]) -> Callable[[], None]:
    """Have a method called at the end of the script, told whether that failed.

    It is held weakly. Returns what takes that back.

    An uncaught exception is seen by our hook before any hook installed so far: libraries that
    close their own runs in one would do so before what is still on its way has arrived. No hook
    is told of `sys.exit`, so that its code is noticed at the call, while the run is open.
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
                sys.stderr.write(f"Closing the trackers after the failure: {problem}\n")
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
        # Where somebody has wrapped them since, they stay, and find nothing to close.
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
    """Let the launcher, which ends the other ranks once one has failed, wait for the last flush."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
