"""`accelerate config`, and where its file is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from accelerate_core.config.files import read_config
from accelerate_drop_in.commands import default_config, run

_DEFAULTS = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1,
             "num_machines": 1, "machine_rank": 0, "mixed_precision": "no", "use_cpu": False,
             "debug": False}  # fmt: skip


def main() -> None:
    """Run `accelerate-core config`."""
    run("config")


def __getattr__(name: str) -> Any:
    default = default_config()
    folders = {"cache_dir": default.parent, "hf_cache_home": default.parent.parent}
    if name in folders:
        return str(folders[name])
    if name == "default_config_file":
        return str(default)
    if name in ("default_yaml_config_file", "default_json_config_file"):
        return str(default.with_suffix(f".{name.split('_')[1]}"))
    raise AttributeError(name)


class BaseConfig(SimpleNamespace):
    """Values of a config file as attributes; those that are not given have the usual ones.

    Args:
        values: the values by name.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**(_DEFAULTS | values))

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, enumerations as texts."""
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
        """Read a config file of JSON, which is YAML, too."""
        return cls.from_yaml_file(json_file)


class ClusterConfig(BaseConfig):
    """The values for processes that are started here, not by a service."""


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Return the values of a config file, the default one if None, as attributes.

    Raises:
        ConfigurationError: it cannot be read.
    """
    return ClusterConfig.from_yaml_file(config_file)
