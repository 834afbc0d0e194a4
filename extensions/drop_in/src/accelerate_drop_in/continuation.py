"""What a function does while the Accelerator calls a client's replacement of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_continuation: ContextVar[Callable[..., Any] | None] = ContextVar("continuation", default=None)


def continuation() -> Callable[..., Any] | None:
    """Return the rest of the Accelerator's work, if it has called the replacement of a function.

    The original function, which the replacement calls, then does this instead of its usual job.
    """
    return _continuation.get()


@contextmanager
def continuing(function: Callable[..., Any] | None) -> Iterator[None]:
    """Let the original function continue with the given one inside the block."""
    token = _continuation.set(function)
    try:
        yield
    finally:
        _continuation.reset(token)
