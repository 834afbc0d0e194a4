"""Write a config file for this machine without asking questions."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import yaml

from accelerate_core.plugin import find
from accelerate_drop_in.environment import get_current_device_type
from accelerate_launch import default_config_path


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path | None = None
) -> Path | bool:
    """Write a config file that uses all accelerators of this machine, or else one CPU process.

    Args:
        mixed_precision: the name of an installed precision.
        save_location: the file; by default the one that `launch` reads.

    Returns:
        The path, or False if the file already exists, which is then not changed.

    Raises:
        ConfigurationError: the precision is not installed.
    """
    path = Path(save_location) if save_location is not None else default_config_path(os.environ)
    if path.exists():
        return False
    precision = find("precision", mixed_precision.lower(), source="write_basic_config").name
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": get_current_device_type()[1] if count > 1 else "NO",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": max(count, 1),
        "use_cpu": count == 0,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path
