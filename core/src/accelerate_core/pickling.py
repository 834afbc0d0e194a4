"""How wrappers of one run are pickled and copied."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def unwrapped(inner: T) -> T:
    """Return the wrapped object.

    `__reduce__` of the wrappers that `prepare` returns names this function, so that a pickle or a
    copy is the user's own object, without what belongs to this run.
    """
    return inner
