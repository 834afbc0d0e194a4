"""The only import that plugin authors need: base classes, types, errors, settings and helpers.

These names and their meaning are part of the contract. The modules that define them may change between
releases. Importing this does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from accelerate_core._exports import read_stub
from accelerate_core.errors import UnknownNameError, did_you_mean

_HOMES = read_stub(__file__)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name not in _HOMES:
        text = f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, _HOMES)}"
        raise UnknownNameError(text, name)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
