"""The table of mutants: backends with one fault, and the check that must notice each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.argv[1], "src")))
from accelerate_sound import SoundBackend as Sound

__all__ = ["MUTANTS", "Sound", "caught_by", "passes"]

MUTANTS: dict[str, tuple[type, str]] = {}


def caught_by(check: str) -> Any:
    """Register a backend with a fault, and the check that must notice it."""

    def register(cls: type) -> type:
        MUTANTS[cls.__name__] = (cls, check)
        return cls

    return register


def passes(*checks: str) -> Any:
    """Register an unusual but correct backend, and each check that it must pass."""

    def register(cls: type) -> type:
        for check in checks:
            MUTANTS[f"{cls.__name__}.{check}"] = (cls, check)
        return cls

    return register
