"""The devices of an imaginary vendor.

A real vendor has a library with kernels, and calls its device by a name of its own. Here, the device of
accelerate-testing takes that place, so the type is named `fake`.
"""

from __future__ import annotations

import os

from accelerate_core.plugin import DevicePlugin

__all__ = ["Imagine", "autoload"]

VISIBLE = "IMAGINE_VISIBLE_DEVICES"


def autoload() -> None:
    """Register the device with torch. A vendor's library does this when torch is imported."""
    from accelerate_testing import fake_device

    visible = os.environ.get(VISIBLE, "0,1,2,3")
    fake_device.install(devices=len(visible.split(",")))


class Imagine(DevicePlugin):
    """What torch can't say about the device."""

    name = "fake"
    api_version = (1, 0)
    visible_devices = VISIBLE
    precisions = ("no", "bf16")  # it has no kernels for float16
    float64 = True
