"""Support for pickling and copying the objects that `prepare` returns."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def unwrapped(inner: T) -> T:
    """Return the wrapped object.

    The wrappers that `prepare` returns use this function in `__reduce__`, so that a pickle or a copy contains
    the user's object without the state of this run.
    """
    return inner
