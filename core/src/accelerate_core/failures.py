"""Failures: which exceptions count as one, and what reports those that end this process."""

from __future__ import annotations

import atexit
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterable

#: Entry points of functions that are called once, before this process uses the core. accelerate-launch
#: has one, which records uncaught exceptions and shortens their tracebacks.
AT_START = "accelerate_core.at_start"

_started = False
_failed = False


def report_uncaught(points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
    """Let installed plugins report uncaught exceptions. Calling this again has no effect.

    Args:
        points: the entry points of the group `AT_START`; default: scan the distributions.
    """
    global _started
    if _started:
        return
    _started = True
    if points is None:
        points = importlib.metadata.entry_points(group=AT_START)
    for point in points:
        try:
            point.load()()
        except Exception as error:  # raising it could hide the error that is being created
            sys.stderr.write(f"{point.value} failed: {type(error).__name__}: {error}\n")


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception means that the script failed: all but a successful exit do."""
    if error is None or isinstance(error, (StopIteration, GeneratorExit)):
        return False
    return error.code not in (None, False, 0) if isinstance(error, SystemExit) else True


def fail_at_exit(error: BaseException) -> None:
    """Show an error that nothing can raise any more, and let this process exit with status 1.

    Use it for what fails while Python exits, or in an object that was deleted.
    """
    global _failed
    _failed = True
    sys.excepthook(type(error), error, error.__traceback__)


@atexit.register  # when the core is imported, so it runs after what other parts of a run register
def _exit_as_failed() -> None:
    if not _failed:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # an exception would only be printed here
