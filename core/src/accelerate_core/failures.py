"""Failures: which exceptions count as one, and what reports those that end this process."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import cast

#: Entry points of functions that are called once, before this process uses the core. accelerate-launch
#: has one, which records uncaught exceptions and shortens their tracebacks.
_AT_START = "accelerate_core.at_start"

_started = False


@functools.cache
def entry_points() -> importlib.metadata.EntryPoints:
    """Scan the entry points of all installed distributions. The result is kept until it is cleared."""
    # Python 3.11 has another type for the same methods.
    return cast(importlib.metadata.EntryPoints, importlib.metadata.entry_points())


def report_uncaught() -> None:
    """Let installed plugins report uncaught exceptions. Calling this again has no effect."""
    global _started
    if _started:
        return
    _started = True
    for point in entry_points().select(group=_AT_START):
        try:
            point.load()()
        except Exception as error:  # raising it could hide the error that is being created
            sys.stderr.write(f"{point.value} failed: {type(error).__name__}: {error}\n")


def is_failure(error: BaseException | None) -> bool:
    """Return whether an exception means that the script failed: all but a successful exit do."""
    if error is None or isinstance(error, (StopIteration, GeneratorExit)):
        return False
    return error.code not in (None, False, 0) if isinstance(error, SystemExit) else True
