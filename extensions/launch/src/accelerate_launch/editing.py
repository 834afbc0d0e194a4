"""Change one value in the text of a config file and keep the rest unchanged."""

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

from accelerate_core.plugin import ConfigurationError

#: Matches the first key inside a section, to find out the indentation.
_SECTION = re.compile(r"^[^\s#].*\n( +)[^\s#-]", re.MULTILINE)


def with_value(text: str, key: str, value: str) -> str:
    """Return the text with `key`, or `section.key`, set to a value in YAML notation.

    Comments, quotes, the order of keys and the spelling of other values are kept.

    Raises:
        ConfigurationError: the value is not valid YAML, or the section is not a mapping.
    """
    try:
        yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(
            f"The value {value!r} for {key} is not valid YAML: {str(error).splitlines()[0]}."
        ) from None
    if "\n" in value or "\n" in key or not key.strip():
        raise ConfigurationError(f"The key {key!r} and its value must each be a single line.")
    editor = _editor(text)
    root = editor.load(text)
    head = ""
    if root is None:  # the file is empty, or has only comments
        root = CommentedMap()
        head = text if text.endswith("\n") else f"{text}\n".lstrip()
    if not isinstance(root, CommentedMap):
        raise ConfigurationError("The config file must be a mapping of keys to values.")
    section, _, name = key.rpartition(".")
    inside = _section(root, section) if section else root
    new = editor.load(value)
    # ruamel would put a plain str into the quotes of the old value.
    inside[name] = PlainScalarString(new) if type(new) is str else new
    out = io.StringIO()
    editor.dump(root, out)
    return head + out.getvalue()


class _Words(VersionedResolver):
    """Keeps every plain scalar as a string, so that `True`, `~` and `1e-4` are written unchanged."""

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
    if offset is not None:  # the file has a list
        editor.indent(sequence=indent, offset=offset)
    return editor


def _section(root: CommentedMap, name: str) -> Any:
    """Return a section. If it is missing or empty, create it."""
    if root.get(name) in (None, "", "null", "~"):
        root[name] = CommentedMap()
    if not isinstance(root[name], CommentedMap):
        raise ConfigurationError(f"{name} is not a section of keys and values.")
    return root[name]
