"""Does this machine have what a plugin runs on? Checks that need a device are else skipped, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from accelerate_core.errors import AccelerateError, listing

__all__ = ["missing_device", "runs_on_cpu"]


def runs_on_cpu(plugin: Any) -> bool:
    """Whether the checks run on the CPU: unless a backend or a precision says it cannot."""
    declared = _declared(plugin)
    if declared is not None:
        return "cpu" in declared
    return not _refusal(plugin, torch.device("cpu"))


def missing_device(plugin: Any) -> str:
    """Return why a plugin cannot run on this machine, "" if it can."""
    if runs_on_cpu(plugin):
        return ""
    declared = _declared(plugin)
    if declared is not None:
        if any(_is_here(kind) for kind in declared) or _chooses(plugin):
            return ""
        return f"it needs a {listing(declared)} device".replace("'", "")
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and not _refusal(plugin, here):
        return ""
    return f"it needs another device: {_refusal(plugin, here or torch.device('cpu'))}"


def _declared(plugin: Any) -> tuple[str, ...] | None:
    supports = getattr(plugin, "supports", {})
    devices = supports.get("devices") if hasattr(supports, "get") else None
    return None if devices is None else tuple(devices)


def _is_here(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # torch knows no such device
        return False


def _chooses(plugin: Any) -> bool:
    """Whether a backend chooses its device itself: then torch need not know of it."""
    from accelerate_core.backend import Backend

    return getattr(plugin, "device", None) is not Backend.device


def _refusal(plugin: Any, device: torch.device) -> str:
    """Return why a precision refuses a device, "" if it does not."""
    from accelerate_core.backend.precision import Precision

    if not (isinstance(plugin, type) and issubclass(plugin, Precision)):
        return ""
    try:
        plugin().check(cast(Any, SimpleNamespace(device=device)))
    except AccelerateError as error:
        return str(error)
    except Exception:  # a fault of its own, which the checks tell
        return ""
    return ""
