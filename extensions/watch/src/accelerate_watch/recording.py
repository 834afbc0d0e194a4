"""Ask torch to record collectives, without importing it."""

from __future__ import annotations

import os
from collections.abc import Callable

#: Sets how many collectives torch records. Must be set before the first process group is created.
SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
_SIZE = "512"


def request_recording() -> Callable[[], object]:
    """Make torch record collectives, unless the environment says how many. Return the undo function."""
    if SIZE_VARIABLE in os.environ:
        return lambda: None
    os.environ[SIZE_VARIABLE] = _SIZE
    return lambda: os.environ.pop(SIZE_VARIABLE, None)
