"""`accelerate config`, and where its file is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate_core.config.files import read_config
from accelerate_drop_in.commands import default_config, run

_DEFAULTS = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1,
             "num_machines": 1, "machine_rank": 0, "mixed_precision": "no", "use_cpu": False,
             "debug": False}  # fmt: skip


def main() -> None:
    """Run `accelerate-core config`."""
    run("config")


def __getattr__(name: str) -> Any:
    if name == "default_config_file":
        return str(default_config())
    raise AttributeError(name)


def load_config_from_file(config_file: str | None) -> SimpleNamespace:
    """Return the values of a config file, the default one if None, as attributes.

    Raises:
        ConfigurationError: it cannot be read.
    """
    read = read_config(config_file or str(default_config()))
    return SimpleNamespace(**(_DEFAULTS | dict(read)))
