"""Save and restore the random number generators of one process as plain data.

The keys are the same as in Accelerate's files.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch


def capture_rng_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy, torch and the given devices.

    Don't pass devices that this process does not use: reading a state allocates memory on the
    device.
    """
    state: dict[str, Any] = {
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        plain = (keys.tolist(), int(position), int(has_gauss), float(cached))
        state["numpy_random_seed"] = (name, *plain)
    per_device = {}
    for device in devices:
        # For devices without a torch module, the backend saves the state.
        module = None if device.type in ("cpu", "meta") else getattr(torch, device.type, None)
        if module is not None and hasattr(module, "get_rng_state"):
            per_device[str(device)] = module.get_rng_state(device).cpu()
    if per_device:
        state["devices"] = per_device
    return state


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check states from `capture_rng_state` or Accelerate, by restoring them in other generators.

    Raises:
        ValueError: a state is missing or not valid. It names the key.
    """
    key = "random_state"
    try:
        version, internal, gauss = state[key]
        random.Random(0).setstate((version, tuple(internal), gauss))
        key = "torch_manual_seed"
        torch.Generator().set_state(state[key].cpu())
        key = "numpy_random_seed"
        if key in state and find_spec("numpy") is not None:
            name, keys, position, *rest = state[key]
            if not 0 <= position <= 624:
                raise ValueError(f"the position {position!r} is not from 0 to 624")
            import numpy

            generator = numpy.random.RandomState(0)
            generator.set_state((name, _as_keys(keys), position, *rest))
        key = "devices"
        _device_states(state)
    except Exception as error:  # the generators raise any type for a state that they don't expect
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{key!r} is not the state of a generator ({type(error).__name__}: {text})."
        ) from error


def restore_rng_state(state: Mapping[str, Any]) -> list[str]:
    """Restore states from `capture_rng_state` or Accelerate. Return the names that failed."""
    version, internal, gauss = state["random_state"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch_manual_seed"].cpu())
    if "numpy_random_seed" in state:
        try:
            import numpy
        except ImportError:
            return ["numpy"]
        name, keys, *rest = state["numpy_random_seed"]
        numpy.random.set_state((name, _as_keys(keys), *rest))
    missed = []
    for name, tensor in _device_states(state):
        try:
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(tensor, device)
        except (RuntimeError, AttributeError, AssertionError, IndexError, TypeError, ValueError):
            missed.append(name)
    return missed


def _as_keys(keys: Any) -> Any:
    if len(keys) != 624:
        raise ValueError(f"it has {len(keys)} keys, not 624")
    import numpy

    return numpy.asarray(keys, dtype="uint32")


def _device_states(state: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = list(state.get("devices", {}).items())
    for key, tensors in state.items():
        # Accelerate's key for a type of device is such as torch_cuda_manual_seed.
        kind = key.removeprefix("torch_").removesuffix("_manual_seed")
        if key == f"torch_{kind}_manual_seed" and isinstance(tensors, list):
            found += [(f"{kind}:{index}", tensor) for index, tensor in enumerate(tensors)]
    for name, tensor in found:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the state of {name!r} is not a tensor")
    return found
