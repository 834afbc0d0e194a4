"""Read YAML config files, and remember the line of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate_core.errors import ConfigurationError
from accelerate_core.untrusted import read_limited

#: The variable that names the config file of a script that the launcher did not start.
CONFIG_VARIABLE = "ACCELERATE_CONFIG_FILE"


class ConfigFile(Mapping[str, Any]):
    """The values of one file. Keys in a section are looked up as `section.key`."""

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


#: More keys than any setup needs. Nested aliases could expand without limit.
_MOST_KEYS = 10_000
#: Bytes of a file. YAML needs a second for each of them.
_LARGEST = 1 << 20


def read_config(path: str | Path) -> ConfigFile:
    """Read a YAML config file.

    Raises:
        ConfigurationError: the file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    try:
        # The user named the file, and it may be a pipe, such as <(generate).
        text = read_limited(path, _LARGEST, regular=False).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"Cannot read the config file {path}: {why}.") from error
    return parse_config(text, path)


def parse_config(text: str, path: Path) -> ConfigFile:
    """Parse the text of a config file. `path` is its location, for error messages."""
    import yaml  # most runs have no config file

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        if node is not None:
            _expanded_size(node, {}, path)
        _collect(node, "", lines, path)
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"The config file {path} is not valid YAML: {_said(error)}"
        ) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # For example a date with month 13, a tag that does not match its value, or deep nesting.
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"The config file {path} has a value that YAML cannot represent: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}."
        ) from None
    if values is None:
        return ConfigFile(path, {}, {})
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"The config file {path} must be a mapping of keys to values, not {type(values).__name__}."
        )
    return ConfigFile(path, *_modern(values, lines))


def _said(error: Any) -> str:
    """Return the problem with its line and column, without the parser's context."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})." if mark else f"{problem}."


def _modern(values: dict[Any, Any], lines: dict[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """Convert keys of older versions of Accelerate to the current ones."""
    made = {str(key): value for key, value in values.items()}
    # Older files contain a section for every feature, which is empty if the feature is off.
    made = {key: value for key, value in made.items() if value not in ({}, [], None)}
    if made.get("num_processes") == -1:
        del made["num_processes"]  # -1 means that it is not set
    for key in ("mixed_precision", "dynamo_backend"):
        if made.get(key) is False:
            made[key] = "no"  # YAML reads a bare no as false
    if "fp16" in made:
        older = made.pop("fp16")
        made.setdefault("mixed_precision", "fp16" if older is True else "no")
        lines.setdefault("mixed_precision", lines["fp16"])
    if "dynamo_backend" in made and "dynamo_config" not in made:
        made["dynamo_config"] = {"backend": made.pop("dynamo_backend")}
        lines["dynamo_config"] = lines["dynamo_backend"]
        lines["dynamo_config.backend"] = lines["dynamo_backend"]
    return made, lines


def _expanded_size(node: Any, sizes: dict[int, int], path: Path) -> int:
    """Return the number of values in a node if each alias were written out.

    Raises:
        ConfigurationError: there are too many, or a value has a character that UTF-8 cannot represent.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 1  # for an alias of a node inside itself
    line = node.start_mark.line + 1
    if node.id == "scalar":
        try:
            node.value.encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{path} line {line} has a character that UTF-8 cannot represent: {error.reason}."
            ) from None
        return 1
    pairs = node.value if node.id == "mapping" else [(child,) for child in node.value]
    children = [child for pair in pairs for child in pair]
    size = 1 + sum(_expanded_size(child, sizes, path) for child in children)
    if size > 10 * _MOST_KEYS:
        raise ConfigurationError(
            f"The config file {path} expands to more than {10 * _MOST_KEYS} values at line {line}. "
            "Nested aliases multiply; remove some of them."
        )
    sizes[id(node)] = size
    return size


def _collect(node: Any, prefix: str, lines: dict[str, int], path: Path) -> None:
    if getattr(node, "id", None) != "mapping":
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise ConfigurationError(f"The key on line {line} of {path} is not a plain name.")
        name = f"{prefix}{key.value}"
        if name in lines:
            raise ConfigurationError(
                f"{path} defines {name!r} twice, on lines {lines[name]} and {line}."
            )
        lines[name] = line
        if len(lines) > _MOST_KEYS:
            raise ConfigurationError(
                f"The config file {path} expands to more than {_MOST_KEYS} keys at line {line}. Nested "
                "aliases multiply; remove some of them."
            )
        if value.id == "scalar" and value.tag.endswith((":int", ":float")) and ":" in value.value:
            value.tag = "tag:yaml.org,2002:str"  # YAML 1.1 reads 1:4 as 64, in base 60
        _collect(value, f"{name}.", lines, path)
