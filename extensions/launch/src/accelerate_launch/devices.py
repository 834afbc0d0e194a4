"""Find out about this machine's devices, addresses and ports, without importing torch here."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path

import psutil

from accelerate_core.plugin import ConfigurationError, disabled_names, installed, listing
from accelerate_launch.machine_0 import resolve
from accelerate_launch.plan import DEFAULT_PORT, LOOPBACK

_BUILD = re.compile(r"^(cuda|hip|rocm|xpu)\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_COUNT = "import torch; a = torch.accelerator; print(a.device_count() if a.is_available() else 0)"


def torch_build() -> dict[str, str]:
    """Return what torch was built for, such as `{"cuda": "12.8"}`; empty for a CPU build."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(_BUILD.findall(text))


def count_accelerators(environ: Mapping[str, str]) -> int:
    """Return how many accelerators torch sees, 0 if there are none.

    For a CPU build without device extensions, the answer needs no process. Otherwise a separate
    process asks torch, so that this one touches no device. On macOS, every build has Apple's device.
    """
    built = torch_build() or sys.platform == "darwin"
    if not built and not metadata.entry_points(group="torch.backends"):
        return 0
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 0


def visible_devices_variable() -> str:
    """Return the environment variable that selects the devices of this machine's accelerator.

    A device plugin whose name or `builds` are part of torch's build comes first, then one that an
    installed distribution adds.

    Raises:
        ConfigurationError: no plugin has a variable, or several have one.
    """
    built = torch_build()
    records = [one for one in installed().of_kind("device") if one.name not in disabled_names()]
    plugins = [record.load_checked() for record in records]
    named = [one for one in plugins if one.visible_devices]
    matching = [one for one in named if any(build in built for build in one.builds)]
    chosen = matching or [one for one in named if not one.builds]
    if len(chosen) == 1:
        return str(chosen[0].visible_devices)
    if chosen:
        names = listing([one.name for one in chosen])
        raise ConfigurationError(
            f"gpu_ids is set, but there are plugins for the devices {names}. Disable all but one with "
            "ACCELERATE_DISABLED_PLUGINS, or select devices with the variable of your device."
        )
    raise ConfigurationError(
        "gpu_ids is set, but the installed torch is a CPU build, and no plugin for another device is "
        "installed. Leave gpu_ids out, or select the devices with the environment variable of your "
        "device's vendor."
    )


def threads_for(processes: int) -> int:
    """Return how many CPU threads each of `processes` on this machine should use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // max(1, processes))


def local_address(peer: str, port: int | None) -> str | None:
    """Return the address at which `peer` can reach this machine, None if it is unknown.

    No packet is sent. The system only looks up its route.
    """
    try:
        found = resolve(peer, port or 1, socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_address_of(address: str, name: str) -> bool:
    """Return whether a host name or address resolves to `address`."""
    try:
        return address in {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return address == name


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return str(name)
    return None


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether something listens on a port of this host. The default is torch's port, 29500."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex((LOOPBACK, DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port that is free at the moment of the call."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
