"""The public names once more, where Hugging Face Accelerate has them; with what packages export."""

from __future__ import annotations

from typing import Any

import accelerate_core


def __getattr__(name: str) -> Any:
    return getattr(accelerate_core, name)


def __dir__() -> list[str]:
    return dir(accelerate_core)
