"""Launch options and config sections of plugins, checked against the plugins' settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate_core.config.lookup import converted
from accelerate_core.plugin import (
    ConfigFile,
    ConfigurationError,
    MissingPluginError,
    Mistakes,
    SettingField,
    SourcedValue,
    did_you_mean,
    installed,
    listing,
    parse_bool,
)
from accelerate_core.plugins import catalog
from accelerate_launch import accelerate_options
from accelerate_launch.checks import check_mapping
from accelerate_launch.options import LAUNCH_OPTIONS
from accelerate_launch.schemas import PluginSchema, plugin_schemas

#: The variable that requests a device mesh, with sizes from other environment variables.
MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"


class UnusedOptionError(ConfigurationError):
    """An option of `launch` belongs to a backend or precision that the launch does not use.

    Cause: the option was given without selecting its plugin, or with another plugin.
    Fix: add the option that the error names, or leave this one out.
    """

    #: The option's names, without dashes.
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contributed:
    """One option of a plugin: a field of its settings, or the switch that selects the plugin.

    Attributes:
        shared_with: other plugins of the same kind with the same option, such as a backend that is
            built on another one and uses its settings.
    """

    schema: PluginSchema
    field: SettingField
    shared_with: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The key of the option in the `given` mapping of `make_plan`."""
        # The field's name isn't enough: several settings classes of a plugin may have it.
        return f"plugin:{self.schema.kind}:{self.schema.name}:{self.env}"

    @property
    def env(self) -> str:
        """The environment variable that carries the value to the processes."""
        return self.field.env[0]

    @property
    def switch(self) -> bool:
        """Whether the option only selects the plugin and sets nothing."""
        return self.env in self.schema.switches


def contributed_options(environ: Mapping[str, str]) -> tuple[Contributed, ...]:
    """Return the options of all installed plugins. If two have the same name, the first has it."""
    made: list[Contributed] = []
    taken = {name for option in LAUNCH_OPTIONS for name in option.cli}
    schemas = plugin_schemas(environ)
    for schema in schemas:
        for field in (*_switches(schema), *schema.fields):
            names = tuple(name for name in field.cli if name not in taken)
            taken.update(names)
            if names and field.env:  # the value reaches the processes as an environment variable
                shared = _also_with(field, schema, schemas)
                made.append(Contributed(schema, replace(field, cli=names), shared))
    return tuple(made)


def _also_with(
    field: SettingField, schema: PluginSchema, schemas: Iterable[PluginSchema]
) -> tuple[str, ...]:
    """Return the other plugins of this kind that have the same field in the same section."""
    place = (schema.kind, schema.section)
    same = [one for one in schemas if (one.kind, one.section) == place and one is not schema]
    return tuple(one.name for one in same if field in one.fields)


def _switches(schema: PluginSchema) -> Iterable[SettingField]:
    for name in schema.switches:
        option = name.removeprefix("ACCELERATE_").lower()
        if schema.kind == "launcher":
            option = option.removeprefix("use_")
        yield SettingField(
            name, "bool", None, f"use {schema.name}: {schema.summary}", (name,), (option,), ()
        )


def set_in_environment(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the variables among `names` that are set in `environ`."""
    return {
        name: SourcedValue(environ[name], f"environment variable {name}")
        for name in sorted(names)
        if environ.get(name)
    }


def plugin_variables(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the variables in `environ` that set options of installed plugins."""
    return set_in_environment({one.env for one in contributed_options(environ)}, environ)


def refuse_unknown(name: str, known: Iterable[str]) -> None:
    """Raise an error that explains why an option of Accelerate's launcher is not accepted.

    Other names raise nothing.

    Raises:
        MissingPluginError: its plugin is not installed; the text has the pip command.
        ConfigurationError: no plugin accepts it, or its plugin has no such option.
    """
    if name in accelerate_options.REFUSED_OPTIONS:
        raise ConfigurationError(
            f"--{name} is not supported. {accelerate_options.REFUSED_OPTIONS[name]}"
        )
    extra = accelerate_options.owner_of_option(name)
    if extra is None:
        return
    if extra not in {record.name for record in installed().plugins}:
        raise MissingPluginError(
            f"--{name} belongs to the plugin {extra!r}, which is not installed. "
            f"Install it with: {catalog.pip_command(extra)}"
        )
    raise ConfigurationError(
        f"The plugin {extra!r} has no option --{name}.{did_you_mean(name, known)}"
    )


def take(
    given: Mapping[str, Any],
    backend: SourcedValue,
    precision: SourcedValue,
    environ: Mapping[str, str],
) -> tuple[dict[str, SourcedValue], SourcedValue]:
    """Return the variables that the options of plugins set, and the backend that they select.

    Raises:
        ConfigurationError: a value is invalid, or an option belongs to a backend or precision that is
            not selected.
    """
    wanted = {
        key: value
        for key, value in given.items()
        if key.startswith("plugin:") and value not in (None, ())
    }
    if not wanted:
        return {}, backend
    options = [one for one in contributed_options(environ) if one.key in wanted]
    made: dict[str, SourcedValue] = {}
    for one in sorted(
        options, key=lambda one: not one.switch
    ):  # switches first: they set `backend`
        option, schema = f"--{one.field.cli[0]}", one.schema
        origin = f"command line {option}"
        if one.switch:
            if schema.kind == "backend":
                backend = _single_backend(backend, SourcedValue(schema.name, origin))
            made[one.env] = SourcedValue("true", origin)
            continue
        if schema.kind == "backend" and backend.value is None:
            for variable in schema.switches:
                if parse_bool(environ.get(variable, "")):
                    backend = SourcedValue(schema.name, f"environment variable {variable}")
        _check_asked_for(one, precision if schema.kind == "precision" else backend)
        if schema.section == "parallelism_config":
            made.setdefault(MESH, SourcedValue("true", origin))
        check_value(one.field, wanted[one.key], f"{option} {wanted[one.key]}")
        value = wanted[one.key]
        text = json.dumps(value) if one.field.kind == "list" else str(value)
        made[one.env] = SourcedValue(text, origin)
    return made, backend


def _single_backend(backend: SourcedValue, asked: SourcedValue) -> SourcedValue:
    if backend.value not in (None, asked.value):
        raise ConfigurationError(
            f"{asked.origin} selects the backend {asked.value!r}, but {backend.origin} selects "
            f"{backend.value!r}. Leave one of them out."
        )
    return backend if backend.value is not None else asked


def _check_asked_for(one: Contributed, asked: SourcedValue) -> None:
    schema = one.schema
    if schema.kind not in ("backend", "precision"):
        return
    if asked.value in (schema.name, *one.shared_with):
        return
    if asked.value is None and schema.name == catalog.SEVERAL_PROCESSES:
        return
    switch = schema.switches[0].removeprefix("ACCELERATE_").lower() if schema.switches else ""
    option = "--backend" if schema.kind == "backend" else "--mixed_precision"
    way = f"--{switch} or {option} {schema.name}" if switch else f"{option} {schema.name}"
    given = asked.value is not None and asked.origin != "default"
    other = f" ({asked.origin} selects {asked.value!r})" if given else ""
    error = UnusedOptionError(
        f"--{one.field.cli[0]} belongs to the {schema.kind} {schema.name!r}, which this launch does "
        f"not use{other}. Add {way}, or leave the option out."
    )
    error.names = one.field.cli
    raise error


def check_value(field: SettingField, value: Any, where: str) -> None:
    """Check that a value is valid for its field.

    Raises:
        ConfigurationError: it is not; the text has `where`, the allowed values and the most similar.
    """
    for one in value if isinstance(value, list | tuple) and field.kind == "list" else [value]:
        if str(one).lower() not in ("none", "null", ""):
            converted(field, one, where)


def check_sections(config: ConfigFile, environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Check the sections of plugins in a config file, and return their values by variable.

    If a plugin is not installed, only the form of its section is checked.

    Raises:
        ConfigurationError: a section is not a mapping, a key is unknown, or a value is invalid. The
            text has file, line and the most similar name.
    """
    # `get` returns None for a key with a dot, which is an error that is reported elsewhere.
    named = [key for key in config if key and config.get(key) is not None]
    here = [key for key in named if isinstance(config[key], dict) or key.endswith("_config")]
    here += [key for key in catalog.KEYS if config.get(key)]
    said: dict[str, SourcedValue] = {}
    if not here:
        return said
    by_section: dict[str, list[PluginSchema]] = {}
    for schema in plugin_schemas(environ):
        by_section.setdefault(schema.section, []).append(schema)
    mistakes = Mistakes()
    for key in here:
        schemas = [one for one in by_section.get(key, ()) if not one.problem]
        with mistakes:
            if key in by_section or key in catalog.SECTIONS:
                check_mapping(config, key)
            if schemas:
                said.update(_check_section(config, key, schemas))
            for field in filter(None, (one.field_of_key(key) for one in by_section.get("", ()))):
                check_value(field, config[key], f"{key}: {config[key]!r} ({config.where(key)})")
                said |= {
                    name: SourcedValue(config[key], config.where(key)) for name in field.env[:1]
                }
    mistakes.report()
    return said


def _check_section(
    config: ConfigFile, section: str, schemas: Sequence[PluginSchema]
) -> dict[str, SourcedValue]:
    said: dict[str, SourcedValue] = {}
    mistakes = Mistakes()
    for key, value in config[section].items():
        with mistakes:
            where = config.where(f"{section}.{key}")
            found = [one.field_of_key(str(key)) for one in schemas]
            field = next((one for one in found if one is not None), None)
            if field is not None:
                check_value(field, value, f"{section}.{key}: {value!r} ({where})")
                if value is not None and field.env:
                    said[field.env[0]] = SourcedValue(value, where)
                continue
            if catalog.OPTIONS.get(str(key)) not in (None, *(one.name for one in schemas)):
                continue  # another plugin reads this key from the section
            fields = [each for one in schemas for each in one.fields]
            known = [name for each in fields for name in each.yaml]
            raise ConfigurationError(
                f"Unknown key {str(key)!r} in {section} of {where}.{did_you_mean(str(key), known)} The "
                f"keys are {listing(dict.fromkeys(key for f in fields for key in f.yaml[:1]))}."
            )
    mistakes.report()
    return said
