"""Decide on which device the checks of a plugin run, and whether this machine has it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import torch

from accelerate_core.plugin import (
    AccelerateError,
    Backend,
    PluginFactory,
    Precision,
    Sources,
    find,
    listing,
)


def placement_of(plugin: Any, asked: str = "", brought: bool = False) -> tuple[bool, str]:
    """Return whether the checks run on the CPU, and why they cannot run here, "" if they can.

    They run on the CPU unless the plugin declares that it cannot, or another device was asked for.

    Args:
        asked: type of the device that was asked for, such as "cuda"; "" if none was.
        brought: whether only the processes of the checks have this device, because they install it.
    """
    supports = getattr(plugin, "supports", {})
    declared = supports.get("devices") if hasattr(supports, "get") else None
    if asked:
        if not brought and not _is_here(asked) and asked != "cpu":
            return False, f"this machine has no {asked} device"
        if declared is not None and asked not in declared:
            return asked == "cpu", f"it declares the devices {listing(declared)}, not {asked!r}"
        refusal = "" if brought else _refusal(plugin, torch.device(asked))
        return asked == "cpu", refusal
    if declared is None:
        cpu = _refusal(plugin, torch.device("cpu"))
        here = torch.accelerator.current_accelerator(check_available=True) if cpu else None
        why = _refusal(plugin, here) if here else cpu
        return not cpu, why and f"it needs another device: {why}"
    # A backend that chooses its device itself may have one that torch does not know.
    cls = plugin if isinstance(plugin, type) else type(plugin)
    chooses = getattr(cls, "device", None) is not Backend.device or "device" in vars(plugin)
    if "cpu" in declared or chooses or any(map(_is_here, declared)):
        return "cpu" in declared, ""
    return False, f"it needs a {listing(declared)} device".replace("'", "")


def _is_here(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):  # torch has no such type of device
        return False


def _refusal(plugin: Any, device: torch.device) -> str:
    """Return why a precision refuses a device, "" if it does not."""
    if not (isinstance(plugin, type) and issubclass(plugin, Precision)):
        return ""
    try:
        record = find("precision", str(plugin.name), source="the conformance suite")
        precision = PluginFactory(Sources.of(dict(os.environ))).create(record)
        precision.check(cast(Any, SimpleNamespace(device=device)))
    except AccelerateError as error:
        return str(error)
    except Exception:  # a fault of the plugin, which the checks report
        return ""
    return ""
