"""What scripts ask before there is an Accelerator."""

from __future__ import annotations

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
