"""Run a raw PyTorch training loop on any setup by changing five lines.

Everything is imported on first use: `import accelerate_core` does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import FrameType
from typing import Any

from accelerate_core._exports import read_stub

__version__ = "0.1.0"

#: Public name -> the module that defines it.
_HOMES = read_stub(__file__)

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    home = _HOMES.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # takes precedence over exported names
    from accelerate_core.errors import MissingPluginError, UnknownNameError
    from accelerate_core.plugins import catalog, discovery

    try:
        return discovery.exported(name)
    except AttributeError as error:
        text = str(error)
        if text == name:
            known = [*_HOMES, *discovery.exported_names()]
            hint = discovery.suggestion(name, known, catalog.EXPORTS)
            text = f"module 'accelerate_core' has no attribute {name!r}.{hint}"
    if _asked_by_from_import(sys._getframe(1)):
        # Python would replace the message of an AttributeError, which has the hint.
        raise MissingPluginError(text, name=name)
    raise UnknownNameError(text, name)


def _asked_by_from_import(caller: FrameType) -> bool:
    """Return whether the caller is `from accelerate_core import name` rather than an attribute access."""
    module = caller.f_globals.get("__name__")
    return caller.f_code.co_name == "_handle_fromlist" and module == "importlib._bootstrap"


def __dir__() -> list[str]:
    from accelerate_core.plugins import discovery

    return sorted({*globals(), *_HOMES, *discovery.exported_names()})
