"""Run a raw PyTorch training loop on any setup by changing five lines.

Everything is imported on first use: `import accelerate_core` does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi")
#: Public name -> the module that defines it; said once, for type checkers and for us.
_HOMES = {
    name.name: str(line.module)
    for line in ast.parse(_STUB.read_text(encoding="utf-8")).body
    if isinstance(line, ast.ImportFrom) and line.module != "typing"
    for name in line.names
}

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
        return importlib.import_module(f"{__name__}.{name}")  # before anybody's lent name
    from accelerate_core.errors import did_you_mean
    from accelerate_core.plugins import discovery

    try:
        return discovery.lent(name)
    except AttributeError as error:
        if str(error) != name:  # it says more
            raise
        known = [*_HOMES, *discovery.lent_names()]
        raise AttributeError(
            f"module 'accelerate_core' has no attribute {name!r}.{did_you_mean(name, known)}"
        ) from None


def __dir__() -> list[str]:
    from accelerate_core.plugins import discovery

    return sorted({*globals(), *_HOMES, *discovery.lent_names()})
