"""Does this machine have what a plugin runs on? Checks that need a device are else skipped, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.errors import AccelerateError, listing


def device_of(plugin: Any) -> tuple[bool, str]:
    """Return whether the checks run on the CPU, and why they cannot run on this machine, "" if they can.

    They run on the CPU unless a backend or a precision says that it cannot.
    """
    supports = getattr(plugin, "supports", {})
    declared = supports.get("devices") if hasattr(supports, "get") else None
    if declared is None:
        cpu = _refusal(plugin, torch.device("cpu"))
        here = torch.accelerator.current_accelerator(check_available=True) if cpu else None
        why = _refusal(plugin, here) if here else cpu
        return not cpu, why and f"it needs another device: {why}"
    # A backend that chooses its device itself may have one that torch does not know of.
    chooses = getattr(plugin, "device", None) is not Backend.device
    if "cpu" in declared or chooses or any(map(_is_here, declared)):
        return "cpu" in declared, ""
    return False, f"it needs a {listing(declared)} device".replace("'", "")


def _is_here(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # torch knows no such device
        return False


def _refusal(plugin: Any, device: torch.device) -> str:
    """Return why a precision refuses a device, "" if it does not."""
    if not (isinstance(plugin, type) and issubclass(plugin, Precision)):
        return ""
    try:
        plugin().check(cast(Any, SimpleNamespace(device=device)))
    except AccelerateError as error:
        return str(error)
    except Exception:  # a fault of its own, which the checks tell
        return ""
    return ""
