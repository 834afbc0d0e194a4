"""Bind each process to the CPUs nearest to its accelerator (`launch --enable_cpu_affinity`).

The extension runs in the ranks. The launcher sets the environment variable that activates it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from accelerate_core import AcceleratorView, Claim, Request, hookimpl
from accelerate_core.plugin import env_flag, parse_bool

logger = logging.getLogger(__name__)

#: The variable that `launch` sets for its child processes.
VARIABLE = "ACCELERATE_CPU_AFFINITY"


class CpuAffinity:
    """Binds each process to the CPUs nearest to its accelerator when its Accelerator is created."""

    name = "cpu_affinity"
    api_version = (1, 0)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim the run unless the variable is false. `on_start` refuses invalid values."""
        text = request.environ.get(VARIABLE, "")
        if not text or parse_bool(text) is False:
            return None
        return Claim(10, f"environment variable {VARIABLE}={text}")

    @hookimpl
    def on_start(self, accelerator: AcceleratorView) -> None:
        """Bind this process. If ACCELERATE_PLUGINS names this plugin, the variable may be unset.

        Raises:
            ConfigurationError: the value of the variable is not a boolean.
        """
        if env_flag(os.environ, VARIABLE, default=True):
            set_numa_affinity(accelerator.local_process_index)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPUs nearest to its accelerator.

    This does nothing without an accelerator, or if the kernel does not publish the topology.

    Args:
        local_process_index: the index of the accelerator on this machine.
        verbose: log the chosen CPUs at level INFO instead of DEBUG.
    """
    cpus = _nearest_cpus(local_process_index)
    if not cpus:
        logger.debug("No NUMA node is known for local process %d.", local_process_index)
        return
    allowed = sorted(set(cpus) & os.sched_getaffinity(0))
    if allowed:
        os.sched_setaffinity(0, allowed)
        level = logging.INFO if verbose else logging.DEBUG
        logger.log(level, "Local process %d runs on the CPUs %s.", local_process_index, allowed)


def _nearest_cpus(index: int) -> list[int]:
    import torch

    if not torch.accelerator.is_available() or index >= torch.accelerator.device_count():
        return []
    describe = getattr(torch.get_device_module(), "get_device_properties", None)
    properties = describe(index) if describe else None
    bus, slot = getattr(properties, "pci_bus_id", None), getattr(properties, "pci_device_id", 0)
    if bus is None:
        return []
    domain = getattr(properties, "pci_domain_id", 0)
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        if node < 0:
            return []
        return parse_cpu_list(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return []


def parse_cpu_list(text: str) -> list[int]:
    """Parse the kernel's notation for sets of CPUs: `0-3,8` is 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return cpus
