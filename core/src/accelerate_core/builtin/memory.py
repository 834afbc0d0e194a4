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
        # torch.accelerator.empty_cache is missing in torch 2.8, and up to 2.12 it fails on Apple's device.
        module: Any = torch.get_device_module()
        owner = module if hasattr(module, "empty_cache") else torch.accelerator
        owner.empty_cache()
