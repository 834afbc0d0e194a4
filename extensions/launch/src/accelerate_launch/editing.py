"""Change one value in the text of a config file and leave all else as it is."""

from __future__ import annotations

import io
import re
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.scalarstring import PlainScalarString
from ruamel.yaml.util import load_yaml_guess_indent

from accelerate_core.errors import ConfigurationError

#: The first key inside of a section, for its indentation.
_SECTION = re.compile(r"^[^\s#].*\n( +)[^\s#-]", re.MULTILINE)


def with_value(text: str, key: str, value: str) -> str:
    """Return the text with `key`, or `section.key`, set to a value written as in YAML.

    Comments, quotes, the order of keys and the words of other values stay.

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
    editor = _editor(text)
    root = editor.load(text)
    head = ""
    if root is None:  # nothing, or comments alone
        root = CommentedMap()
        head = text if text.endswith("\n") else f"{text}\n".lstrip()
    if not isinstance(root, CommentedMap):
        raise ConfigurationError("The config file must be a mapping of keys to values.")
    section, _, name = key.rpartition(".")
    inside = _section(root, section) if section else root
    new = editor.load(value)
    # A bare str would be given the quotes of the value before it.
    inside[name] = PlainScalarString(new) if type(new) is str else new
    out = io.StringIO()
    editor.dump(root, out)
    return head + out.getvalue()


class _Words(VersionedResolver):
    """Takes every plain scalar as the word it is: `True`, `~` and `1e-4` are written as read."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        return (
            self.DEFAULT_SCALAR_TAG
            if kind is ScalarNode
            else super().resolve(kind, value, implicit)
        )


def _editor(text: str) -> YAML:
    editor = YAML()
    editor.Resolver = _Words
    editor.preserve_quotes = True
    editor.width = 10_000
    editor.explicit_start = text.lstrip().startswith("---")
    if (found := _SECTION.search(text)) is not None:
        editor.indent(mapping=len(found[1]))
    _, indent, offset = load_yaml_guess_indent(text)
    if offset is not None:  # there is a list
        editor.indent(sequence=indent, offset=offset)
    return editor


def _section(root: CommentedMap, name: str) -> Any:
    """Return a section, made if it is not there or empty."""
    if root.get(name) in (None, "", "null", "~"):
        root[name] = CommentedMap()
    if not isinstance(root[name], CommentedMap):
        raise ConfigurationError(f"{name} is no section of keys and values.")
    return root[name]
