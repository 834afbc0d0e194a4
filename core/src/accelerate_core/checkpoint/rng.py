"""The random number generators of one process, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["capture", "restore"]


def capture() -> dict[str, Any]:
    """Return the state of Python's, NumPy's, torch's and the accelerator's generators."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            state[device.type] = module.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the generators to what `capture` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(
            (name, numpy.array(keys, dtype="uint32"), position, has_gauss, cached)
        )
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
