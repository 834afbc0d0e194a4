"""`accelerate to-fsdp2`, for programs that convert a config they have read."""

from __future__ import annotations

from typing import Any

from accelerate_core.errors import MissingPluginError
from accelerate_core.plugins.catalog import pip_command


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config file of FSDP1 in terms of FSDP2.

    Raises:
        ConfigurationError: it is not of FSDP1.
        MissingPluginError: the backend is not installed.
    """
    try:
        from accelerate_fsdp2.convert import converted
    except ModuleNotFoundError as error:
        raise MissingPluginError(f"FSDP2 comes with a backend: {pip_command('fsdp2')}") from error
    return converted(config, "The config")[0]
