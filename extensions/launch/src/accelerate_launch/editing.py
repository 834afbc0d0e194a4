"""Change one value in the text of a config file and leave all else as it is."""

from __future__ import annotations

import yaml

from accelerate_core.errors import ConfigurationError

__all__ = ["with_value"]


def with_value(text: str, key: str, value: str) -> str:
    """Return the text with `key`, or `section.key`, set to a value written as in YAML.

    Raises:
        ConfigurationError: the value is no YAML, or the section is no mapping.
    """
    try:
        yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(
            f"The value {value!r} for {key} is not valid YAML: {str(error).splitlines()[0]}."
        ) from None
    if "\n" in value or "\n" in key or not key.strip():
        raise ConfigurationError(f"{key!r} and its value must each be one line.")
    root = yaml.compose(text, Loader=yaml.SafeLoader) if text.strip() else None
    section, _, name = key.rpartition(".")
    if root is None:
        return f"{text}{_nested(section, name, value)}"
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError("The config file must be a mapping of keys to values.")
    if not section:
        return _set(text, root, name, value, "")
    for found, inside in root.value:
        if found.value == section:
            if isinstance(inside, yaml.MappingNode) and inside.value and not inside.flow_style:
                return _set(text, inside, name, value, " " * inside.start_mark.column)
            if isinstance(inside, yaml.MappingNode):
                return _set_in_flow(text, inside, name, value)
            if inside.value not in ("", "null", "~"):
                raise ConfigurationError(f"{section} is no section of keys and values.")
            start = found.start_mark.index
            end = inside.end_mark.index
            return f"{text[:start]}{_nested(section, name, value).rstrip()}{text[end:]}"
    return f"{_ended(text)}{_nested(section, name, value)}"


def _nested(section: str, name: str, value: str) -> str:
    return f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _set(text: str, node: yaml.MappingNode, name: str, value: str, indent: str) -> str:
    if node.flow_style:
        return _set_in_flow(text, node, name, value)
    for found, old in node.value:
        if found.value == name:
            return _replaced(text, old, value)
    last = node.value[-1][1] if node.value else node
    at = text.find("\n", max(last.end_mark.index - 1, 0))
    if isinstance(last, yaml.CollectionNode) and not last.flow_style:
        at = last.end_mark.index - 1  # ends at the start of the next line
        at = len(text.rstrip()) if at >= len(text.rstrip()) else text.rfind("\n", 0, at + 1)
    head, tail = (text, "") if at < 0 else (text[:at], text[at:].lstrip("\n"))
    return f"{_ended(head)}{indent}{name}: {value}\n{tail}"


def _replaced(text: str, old: yaml.Node, value: str) -> str:
    start, end = old.start_mark.index, old.end_mark.index
    if isinstance(old, yaml.ScalarNode) and start == end:
        return f"{text[:start]} {value}{text[end:]}"
    if isinstance(old, yaml.CollectionNode) and not old.flow_style:
        line = text.rfind("\n", 0, start)
        return f"{text[:line].rstrip()} {value}\n{text[end:]}"
    return f"{text[:start]}{value}{text[end:]}"


def _set_in_flow(text: str, node: yaml.MappingNode, name: str, value: str) -> str:
    for found, old in node.value:
        if found.value == name:
            return f"{text[: old.start_mark.index]}{value}{text[old.end_mark.index :]}"
    at = node.start_mark.index + 1
    more = ", " if node.value else ""
    return f"{text[:at]}{name}: {value}{more}{text[at:]}"
