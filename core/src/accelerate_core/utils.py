"""The public names and those that packages export, under the module name that Accelerate uses."""

from __future__ import annotations

from typing import Any

import accelerate_core


def __getattr__(name: str) -> Any:
    return getattr(accelerate_core, name)


def __dir__() -> list[str]:
    return dir(accelerate_core)
