"""Config files in YAML, each value with the line it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from accelerate_core.errors import ConfigurationError

__all__ = ["CONFIG_VARIABLE", "ConfigFile", "default_config_path", "read_config"]

#: Names the config file for a script that is not started by the launcher.
CONFIG_VARIABLE = "ACCELERATE_CONFIG_FILE"


class ConfigFile(Mapping[str, Any]):
    """The values of one file; sections are flattened for look-up as `section.key`."""

    def __init__(self, path: Path, values: dict[str, Any], lines: dict[str, int]) -> None:
        self.path = path
        self._values = values
        self._lines = lines

    def __getitem__(self, key: str) -> Any:
        value: Any = self._values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise KeyError(key)
            value = value[part]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def where(self, key: str) -> str:
        """Return `file.yaml line 3` for a key."""
        line = self._lines.get(key)
        return f"{self.path} line {line}" if line else str(self.path)


def read_config(path: str | Path) -> ConfigFile:
    """Read a YAML config file.

    Raises:
        ConfigurationError: the file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read the config file {path}: {error.strerror}."
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"The config file {path} is not valid YAML: {error}") from error
    if node is None:
        return ConfigFile(path, {}, {})
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"The config file {path} must be a mapping of keys to values, not {type(values).__name__}."
        )
    lines: dict[str, int] = {}
    _collect(node, "", lines)
    return ConfigFile(path, values, lines)


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Return where the launcher looks for a config file when none is named."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return (
        Path(environ.get("ACCELERATE_CONFIG_HOME", Path(cache) / "accelerate-core")) / "config.yaml"
    )


def _collect(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            lines[name] = key.start_mark.line + 1
            _collect(value, f"{name}.", lines)
