"""What scripts ask before there is an Accelerator."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate_core import PartialState
from accelerate_core.distributed.process import current_user, running
from accelerate_core.errors import ConfigurationError

_F = TypeVar("_F", bound=Callable[..., Any])


def is_initialized() -> bool:
    """Whether an Accelerator or a PartialState has begun in this process."""
    return running() is not None


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever is given."""


def test_launch() -> None:
    """Look whether processes of this kind can be started."""
    PartialState()


class ThreadLocalSharedDict(threading.local):
    """A dict that is shared by the instances of a class, in one thread; a descriptor."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: object, objtype: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: object, value: dict[Any, Any]) -> None:
        self._storage = value


SharedDict = dict


def deepspeed_required(func: _F) -> _F:
    """Decorate a function that is for runs with DeepSpeed only.

    Raises:
        ConfigurationError: an Accelerator runs with another backend, when it is called.
    """

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        user = current_user()
        kind = None if user is None else user.distributed_type
        if kind not in (None, "DEEPSPEED"):
            raise ConfigurationError(
                f"{func.__name__}() is for DeepSpeed, and this run is {kind.value}. Pass a "
                "DeepSpeedPlugin to the Accelerator, or start it with --use_deepspeed."
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]
