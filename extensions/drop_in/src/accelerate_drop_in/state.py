"""Accelerate's functions for processes without an Accelerator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_core import PartialState
from accelerate_core.distributed.process import current_user
from accelerate_core.plugin import ConfigurationError, running

_F = TypeVar("_F", bound=Callable[..., Any])


def is_initialized() -> bool:
    """Return whether this process has an Accelerator or a PartialState."""
    return running() is not None


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for any arguments."""


def test_launch() -> None:
    """Check that a launched process can create a PartialState."""
    PartialState()


class ThreadLocalSharedDict(threading.local):
    """A descriptor for a dict that all instances of a class share within one thread."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: object, objtype: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: object, value: dict[Any, Any]) -> None:
        self._storage = value


SharedDict = dict


def deepspeed_required(func: _F) -> _F:
    """Decorate a function that only works in runs with DeepSpeed.

    Raises:
        ConfigurationError: the function is called and the Accelerator has another backend.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        user = current_user()
        kind = None if user is None else user.distributed_type
        if kind not in (None, "DEEPSPEED"):
            raise ConfigurationError(
                f"{func.__name__}() needs DeepSpeed, but this run is {kind.value}. Pass a "
                "DeepSpeedPlugin to the Accelerator, or launch with --use_deepspeed."
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]
