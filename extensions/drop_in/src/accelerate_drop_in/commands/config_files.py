"""Accelerate's config files: the location of the default one, and their values as attributes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from accelerate_core.plugin import read_config

_DEFAULTS = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1,
             "num_machines": 1, "machine_rank": 0, "mixed_precision": "no", "use_cpu": False,
             "debug": False}  # fmt: skip


def default_config() -> Path:
    """Return the default config file: Accelerate's, unless only the one of accelerate-core exists."""
    from accelerate_launch import default_config_path
    from accelerate_launch.paths import accelerate_config_path

    theirs = accelerate_config_path(os.environ)
    ours = default_config_path(os.environ)
    return ours if ours.is_file() and not theirs.is_file() else theirs


class BaseConfig(SimpleNamespace):
    """The values of a config file as attributes, with defaults for missing ones.

    Args:
        values: the values by name.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**(_DEFAULTS | values))

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, with enumerations as strings."""
        return {name: getattr(value, "value", value) for name, value in vars(self).items()}

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write a config file."""
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")

    def to_json_file(self, json_file: str) -> None:
        """Write a config file as JSON."""
        Path(json_file).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> BaseConfig:
        """Read a config file, the default one if None."""
        return cls(**dict(read_config(yaml_file or str(default_config()))))

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> BaseConfig:
        """Read a JSON config file. JSON is also YAML."""
        return cls.from_yaml_file(json_file)


class ClusterConfig(BaseConfig):
    """The values of a config file for processes on your own machines."""


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Return the values of a config file, the default one if None, as attributes.

    Raises:
        ConfigurationError: the file can't be read.
    """
    return ClusterConfig.from_yaml_file(config_file)
