"""Which classes the replaceable parts of an Accelerator are made of."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from accelerate_core.builtin.no_checkpointer import NoCheckpointer

if TYPE_CHECKING:
    from accelerate_core.contract.parts import Checkpointer

__all__ = ["has_checkpointer", "make_checkpointer"]

#: Module and class of what saves and loads.
CHECKPOINTER = "accelerate_core.checkpoint:DirectoryCheckpointer"


def has_checkpointer() -> bool:
    """Tell whether there is something that saves and loads, without importing it."""
    return importlib.util.find_spec(CHECKPOINTER.partition(":")[0]) is not None


def make_checkpointer(project: Any, signals: str | None) -> Checkpointer:
    """Return what saves and loads; where it cannot be imported, what says so when it is used.

    Raises:
        ConfigurationError: the settings are impossible.
        MissingPluginError: the settings ask for checkpoints, and nothing can make them.
    """
    module, _, name = CHECKPOINTER.partition(":")
    try:
        made: Any = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return NoCheckpointer(project, signals, error)
    checkpointer: Checkpointer = made(project, signals)
    return checkpointer
