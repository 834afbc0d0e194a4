"""The JSON schema of a config file, made from the options and settings that validate the file.

Editors use it to complete keys, show their help and mark mistakes. Like the launcher, it accepts a number
as a string, a choice in any case, and null for no value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from accelerate_core.booleans import OFF, ON
from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.plugin import SettingField, disabled_names, installed
from accelerate_core.plugins import catalog
from accelerate_launch import accelerate_options
from accelerate_launch.checks import FORMS, rendezvous_backends
from accelerate_launch.options import DEPRECATED, LAUNCH_OPTIONS, NAMES_PLUGIN
from accelerate_launch.schemas import PluginSchema, plugin_schemas

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: Setting -> a pattern that its value must match if it is a string.
_PATTERNS = {name: f"^(?:{pattern})$" for name, (pattern, _) in FORMS.items()} | {
    "gpu_ids": r"^\s*([Aa][Ll][Ll]|[\d,\s]+)\s*$"
}

#: A number of machines, or a range of it.
_RANGE = r"^\s*\+?0*[1-9]\d*(:\+?0*[1-9]\d*)?\s*$"


def config_schema(
    environ: Mapping[str, str] | None = None,
    distributions: Collection[str] | None = None,
    schemas: Iterable[PluginSchema] | None = None,
) -> Schema:
    """Return the JSON schema of a config file for the installed plugins.

    A section of a plugin that is not installed may contain any key.

    Args:
        environ: environment variables, which can disable plugins; default: `os.environ`.
        distributions: include only plugins of these packages; default: of all packages.
        schemas: the settings of the plugins; default: those of `plugin_schemas`.
    """
    environ = os.environ if environ is None else environ
    top: dict[str, Schema] = {}
    sections: dict[str, dict[str, Schema]] = {}

    def add(section: str, key: str, schema: Schema) -> None:
        # The first declaration wins, as it does when the file is read.
        (sections.setdefault(section, {}) if section else top).setdefault(key, schema)

    for field in (*LAUNCH_OPTIONS, *CORE_SETTINGS):
        kind = NAMES_PLUGIN.get(field.name)
        names = None if kind is None else _plugin_names(kind, environ, distributions)
        for path in field.yaml:
            section, _, key = path.rpartition(".")
            add(section, key, _setting(field, choices=names))
    add("mpirun_config", "mpirun_ccl", _unused("mpirun is configured by its own variables"))

    plugins = [
        one
        for one in (plugin_schemas(environ) if schemas is None else schemas)
        if distributions is None or one.release.partition(" ")[0] in distributions
    ]
    for plugin in plugins:
        for field in plugin.fields:
            for key in field.yaml:
                add(plugin.section, key, _setting(field, form=plugin.forms.get(field.name)))
    for section, keys in sections.items():
        for key in _keys_of_missing_plugins():
            keys.setdefault(key, {})
        top[section] = _section(keys)
    for section in (*catalog.SECTIONS, *(f"{one.name}_config" for one in plugins if one.problem)):
        top.setdefault(section, _section(None))
    for key, extra in catalog.KEYS.items():
        top.setdefault(key, {"description": f"Read by the plugin {extra}."})
    for key, schema in _keys_of_accelerate().items():
        top.setdefault(key, schema)
    return {
        "$schema": DIALECT,
        "title": "Config file of accelerate-core",
        "type": "object",
        "properties": {key: top[key] for key in sorted(top)},
        "additionalProperties": False,
        "$defs": _definitions(),
    }


def _definitions() -> Schema:
    words = sorted({*ON, *OFF})
    return {
        "unset": {
            "description": "No value: another source or the default decides.",
            "anyOf": [{"type": "null"}, _any_case(["none", "null", ""])],
        },
        "boolean": {"anyOf": [{"type": "boolean"}, {"enum": [0, 1]}, _any_case(words)]},
    }


def _setting(
    field: SettingField, *, choices: Iterable[str] | None = None, form: Schema | None = None
) -> Schema:
    """Return the schema of one value; `form` describes a value that is not a plain scalar."""
    made: Schema = {"description": f"{field.help[:1].upper()}{field.help[1:]}."}
    if field.default is not None and isinstance(field.default, str | int | float):
        made["default"] = field.default
    if field.help.startswith(DEPRECATED):
        made["deprecated"] = True
    forms = _forms(field, list(choices or field.choices or ()), form)
    return made if forms is None else {**made, "anyOf": [*forms, {"$ref": "#/$defs/unset"}]}


def _forms(field: SettingField, choices: list[str], form: Schema | None) -> list[Schema] | None:
    """Return the forms in which a value may be written, None for any."""
    if field.kind == "bool" or field.choices == ("true", "false"):
        return [{"$ref": "#/$defs/boolean"}]
    if field.kind in ("int", "float"):
        number: Schema = {"type": "integer" if field.kind == "int" else "number"}
        if field.minimum is not None:
            number["minimum"] = field.minimum
        if field.maximum is not None:
            number["maximum"] = field.maximum
        digits = r"\d+" if field.kind == "int" else r"[\d.]+([eE][+-]?\d+)?"
        numbers = [number, {"type": "string", "pattern": rf"^\s*[+-]?{digits}\s*$"}]
        if field.name == "num_processes":
            numbers.append({"const": -1, "description": "Older files: not set."})
        return numbers
    if choices:
        words = [{"enum": choices}, _any_case(choices)]
        whole = [int(one) for one in choices if one.isdigit()]
        if whole:
            words.append({"enum": whole})
        if field.name == "mixed_precision":
            words.append({"const": False, "description": "YAML reads a bare no as false."})
        return words
    if field.kind == "list":
        return [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]
    if field.name == "rdzv_backend":
        return [{"enum": rendezvous_backends()}]
    if field.name == "num_machines":
        return [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _RANGE}]
    if field.kind == "str":
        text: Schema = {"type": ["string", "number"]}
        if field.name in _PATTERNS:
            text["pattern"] = _PATTERNS[field.name]
        return [text]
    # A string is parsed when the plugin reads it.
    return [form, {"type": "string"}] if form else None


def _any_case(words: Iterable[str]) -> Schema:
    """Return the schema of a string that is one of some words in upper or lower case."""
    pattern = "|".join("".join(map(_any_case_letter, word)) for word in words)
    return {"type": "string", "pattern": rf"^\s*({pattern})\s*$"}


def _any_case_letter(letter: str) -> str:
    if letter.isalpha():
        return f"[{letter.upper()}{letter.lower()}]"
    # Not re.escape: JavaScript refuses a backslash before a character that needs none.
    return f"\\{letter}" if letter in ".+*?()[]{}|^$\\/" else letter


def _section(keys: Mapping[str, Schema] | None) -> Schema:
    """Return the schema of a section; None for keys that are not known here."""
    mapping: Schema = {"type": "object"}
    if keys is not None:
        mapping |= {"properties": dict(sorted(keys.items())), "additionalProperties": False}
    empty: Schema = {"description": "Older files: an empty section.", "enum": [None, []]}
    return {"anyOf": [mapping, empty]}


def _keys_of_missing_plugins() -> list[str]:
    """Return the keys that only plugins read which are not installed; they may share a section."""
    here = {one.name for one in installed().plugins}
    return [key for key, extra in catalog.OPTIONS.items() if extra not in here]


def _plugin_names(
    kind: str, environ: Mapping[str, str], distributions: Collection[str] | None
) -> list[str]:
    """Return the names of plugins that a file may use, including known plugins to be installed."""
    here = [
        one.name
        for one in installed().of_kind(kind)
        if distributions is None or one.distribution in distributions
    ]
    more = (
        name
        for name, extra in catalog.known_names(kind).items()
        if not any(one.name == extra for one in installed().plugins)
    )
    return sorted({*here, *more} - disabled_names(environ))


def _unused(why: str) -> Schema:
    return {"description": f"Has no effect: {why}", "deprecated": True}


def _keys_of_accelerate() -> dict[str, Schema]:
    """Return the keys of Hugging Face Accelerate's files that are not options here."""
    types = ["NO", "MULTI_CPU", "MULTI_GPU", "MPS", *catalog.DISTRIBUTED_TYPES]
    unset = {"$ref": "#/$defs/unset"}
    other_devices = {"type": "string", "pattern": "^[Mm][Uu][Ll][Tt][Ii]_[A-Za-z]+$"}
    no = {"const": False, "description": "YAML reads a bare NO as false."}
    made: dict[str, Schema] = {
        "distributed_type": {
            "description": "Hugging Face Accelerate's key for the backend. The key backend is clearer.",
            "anyOf": [{"enum": types}, _any_case(types), other_devices, no, unset],
        },
        "compute_environment": {
            "description": "Only LOCAL_MACHINE is supported.",
            "enum": ["LOCAL_MACHINE", None],
        },
        "fp16": {
            "description": "Older files: use mixed_precision instead.",
            "deprecated": True,
        },
        "dynamo_backend": {
            "description": "Older files: use backend in dynamo_config instead.",
            "deprecated": True,
        },
    }
    reasons = {**accelerate_options.OBSOLETE_KEYS, **accelerate_options.IGNORED_KEYS}
    return made | {key: _unused(why) for key, why in reasons.items()}
