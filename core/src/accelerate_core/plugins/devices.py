"""What torch can't say about a type of device: plugins of the group `accelerate_core.devices`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accelerate_core.contract.hooks import API_VERSION
from accelerate_core.errors import ConfigurationError, listing
from accelerate_core.plugins.discovery import disabled_names, installed

if TYPE_CHECKING:
    import torch


class DevicePlugin:
    """One type of device. Subclass it, and override what differs. The defaults are torch's answers.

    Attributes:
        name: torch's name for the type, which is also the name of the entry point.
        visible_devices: the environment variable that selects the devices that a process sees, for
            `launch --gpu_ids`; "" if there is none.
        builds: names in torch's `version.py` that show that torch was built for this type.
        precisions: names of the precisions that the device can compute in, or None for all.
        collectives: torch.distributed's backend for the device, "" for the one that torch chose.
        label: its name in `distributed_type`, as in `MULTI_GPU`; "" for `name` in capitals.
        float64: whether kernels can compute in float64.
    """

    name: ClassVar[str] = ""
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    visible_devices: ClassVar[str] = ""
    builds: ClassVar[tuple[str, ...]] = ()
    precisions: ClassVar[tuple[str, ...] | None] = None
    collectives: ClassVar[str] = ""
    label: ClassVar[str] = ""
    float64: ClassVar[bool] = False

    def start(self) -> None:
        """Apply workarounds for the device; called before a process uses it. By default, do nothing."""


def device_plugin(kind: str) -> Any:
    """Return the plugin for a type of device, or one with the defaults."""
    here = [] if kind in disabled_names() else installed().of_kind("device")
    records = [record for record in here if record.name == kind]
    return records[0].load_checked()() if records else DevicePlugin()


def widest_float(kind: str) -> torch.dtype:
    """Return float64, or float32 if kernels of this type of device can't compute in float64."""
    import torch

    # torch can't say which devices do.
    return torch.float64 if kind == "cpu" or device_plugin(kind).float64 else torch.float32


def start_device() -> None:
    """Apply what the plugin of this machine's accelerator declares, before a process group starts."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        plugin = device_plugin(accelerator.type)
        plugin.start()
        if plugin.collectives:
            dist.Backend.default_device_backend_map[accelerator.type] = plugin.collectives


def check_precision(kind: str, precision: str) -> None:
    """Refuse a precision that the device can't compute in.

    Raises:
        ConfigurationError: the plugin of the type of device doesn't list it.
    """
    accepted = device_plugin(kind).precisions
    if accepted is not None and precision not in accepted:
        raise ConfigurationError(
            f"mixed_precision={precision!r} does not run on {kind} devices, which compute in "
            f"{listing(accepted)}. Use one of them, or another device."
        )
