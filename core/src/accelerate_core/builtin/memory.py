"""Giving an accelerator's unused memory back to it."""

from __future__ import annotations

import gc
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the accelerator's cached, unused memory back to it; without one nothing happens.

    Args:
        garbage_collection: let Python collect unreachable objects first.
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        owner: Any = torch.accelerator
        if not hasattr(owner, "empty_cache"):  # torch 2.8
            owner = torch.get_device_module()
        owner.empty_cache()
