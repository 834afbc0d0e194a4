"""What scripts ask before there is an Accelerator."""

from __future__ import annotations

import threading
from typing import Any

from accelerate_core import PartialState
from accelerate_core.distributed.process import running


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
