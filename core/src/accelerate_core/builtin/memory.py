"""Release the unused memory that torch caches on an accelerator."""

from __future__ import annotations

import gc
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the accelerator's cached, unused memory. Without an accelerator, this has no effect.

    Args:
        garbage_collection: run Python's garbage collector first.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        owner: Any = torch.accelerator
        if not hasattr(owner, "empty_cache"):  # torch 2.8
            owner = torch.get_device_module()
        owner.empty_cache()
