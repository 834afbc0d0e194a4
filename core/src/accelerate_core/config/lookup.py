"""Look up the value of a setting in its sources, and record the source.

The order of precedence is: constructor, command line, environment, config file, detection, default.
The launcher passes the command line to processes as environment variables, together with their
origin, so both share one look-up here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate_core.booleans import require_bool
from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.config.files import CONFIG_VARIABLE, ConfigFile, read_config
from accelerate_core.config.handlers import TorchDynamoPlugin
from accelerate_core.config.provenance import PROVENANCE_VARIABLE, SourcedValue, variable_origin
from accelerate_core.config.schema import SettingField, given_fields, settings_fields
from accelerate_core.errors import ConfigurationError, Mistakes, did_you_mean, listing, warn


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of settings besides the constructor."""

    environ: Mapping[str, str]
    config: ConfigFile | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Sources:
        """Read the environment, and the config file if it names one."""
        named = environ.get(CONFIG_VARIABLE)
        return cls(dict(environ), read_config(named) if named else None)


def resolve_core(
    given: Mapping[str, Any],
    sources: Sources,
    detected: Mapping[str, SourcedValue],
    collected: Mistakes | None = None,
) -> dict[str, SourcedValue]:
    """Resolve every setting of the core.

    Args:
        given: values from the constructor; None if not given.
        sources: environment, config file and command line.
        detected: values that the active backend or the machine suggests.
        collected: collects the mistakes; invalid settings are then missing from the result. Without
            it, mistakes are raised.

    Raises:
        ConfigurationError: values are invalid; the message lists all of them.
    """
    made = {}
    mistakes = Mistakes() if collected is None else collected
    for field in CORE_SETTINGS:
        value, origin = given.get(field.name), f"constructor argument {field.name}"
        with mistakes:
            if value is None:
                made[field.name] = look_up(field, sources, detected=detected)
            else:
                shown = f"{field.name}={value!r} (from {origin})"
                made[field.name] = SourcedValue(converted(field, value, shown), origin)
    if collected is None:
        mistakes.report()
    return made


def section_of(cls: type[Any], owner: str) -> str:
    """Return the section of a config file for a settings class; "" is the top level."""
    _, section, _ = getattr(cls, "__settings_names__", ("", "", ""))
    return f"{owner}_config" if owner and section == "" else section or ""


def resolve_settings(
    cls: type[Any], given: Any, sources: Sources, *, owner: str = ""
) -> tuple[Any, dict[str, SourcedValue]]:
    """Set the remaining fields of a settings object from the environment and the config file.

    Args:
        cls: a class made with `settings`.
        given: an instance from the constructor, or None.
        owner: the plugin's name, for the default environment names.
        sources: environment, config file and command line.

    Returns:
        A new instance, and the value of each field with its source.

    Raises:
        ConfigurationError: the class does not allow a value; the message has its source.
    """
    _, _, argument = getattr(cls, "__settings_names__", ("", "", ""))
    section = section_of(cls, owner)
    origin = f"constructor argument {argument or cls.__name__}"
    provenance = {}
    mistakes = Mistakes()
    for field in settings_fields(cls, owner=owner):
        with mistakes:
            if field.name in given_fields(given):
                provenance[field.name] = SourcedValue(getattr(given, field.name), origin)
            else:
                provenance[field.name] = look_up(field, sources, section)
    mistakes.report()
    said = {name: one for name, one in provenance.items() if one.origin != "default"}
    try:
        made = cls(**{name: one.value for name, one in said.items()})
    except ConfigurationError as error:
        origins = "; ".join(f"{name} from {one.origin}" for name, one in said.items())
        raise ConfigurationError(f"{error} ({origins})") from None
    provenance = {
        name: SourcedValue(getattr(made, name), one.origin) for name, one in provenance.items()
    }
    # Plugins use it to name the source of a field in an error.
    object.__setattr__(made, "__provenance__", provenance)
    return made, provenance


def resolve_compiler(given: Mapping[str, Any], sources: Sources) -> TorchDynamoPlugin:
    """Return the compiler settings. `given` are the arguments of the Accelerator.

    Raises:
        ConfigurationError: both a backend and a plugin are set, or options are set without a backend.
    """
    plugin, backend = given.get("dynamo_plugin"), given.get("dynamo_backend")
    if plugin is not None and backend is not None:
        raise ConfigurationError("Pass dynamo_backend or dynamo_plugin, not both.")
    if backend is not None:
        plugin = TorchDynamoPlugin(backend=str(getattr(backend, "value", backend)))
    made: TorchDynamoPlugin
    made, provenance = resolve_settings(TorchDynamoPlugin, plugin, sources)
    for name in ("mode", "fullgraph", "dynamic", "options", "use_regional_compilation"):
        asked = getattr(made, name) not in (None, False, "default")
        if asked and made.backend is None and not made.disable:
            raise ConfigurationError(
                f"{provenance[name].origin} sets {name}={getattr(made, name)!r} without a compiler "
                "backend. Set it as well: 'inductor' is torch's compiler, and 'no' turns it off."
            )
    return made


def look_up(
    field: SettingField,
    sources: Sources,
    section: str = "",
    detected: Mapping[str, SourcedValue] | None = None,
) -> SourcedValue:
    """Return the value of a setting from the source with the highest precedence that has one.

    Raises:
        ConfigurationError: the value is invalid. The message has its source and the allowed values.
    """
    for name in field.env:
        if text := sources.environ.get(name):
            origin = variable_origin(name, sources.environ)
            shown = f"{field.name}={text!r} (from {origin})"
            return SourcedValue(converted(field, text, shown, variable=name), origin)
    for key in (f"{section}.{name}" if section else name for name in field.yaml):
        if (config := sources.config) is not None and config.get(key) not in (None, ""):
            where = config.where(key)
            return SourcedValue(
                converted(field, config[key], f"{key}: {config[key]!r} ({where})"), where
            )
    return (detected or {}).get(field.name) or SourcedValue(field.default, "default")


def converted(field: SettingField, value: Any, shown: str, *, variable: str = "") -> Any:
    """Convert a value from a source to the type of the field.

    Args:
        field: the setting.
        value: the value.
        shown: the value with its source, for errors.
        variable: the environment variable that it comes from.

    Raises:
        ConfigurationError: it is invalid. The message has the allowed values and the nearest one.
    """
    text = str(value).strip().lower()
    if field.optional and text in ("none", "null"):
        return None
    if field.kind == "bool" or field.choices == ("true", "false"):
        return require_bool(value, shown)
    if field.kind in ("int", "float"):
        return _number(field, value, shown)
    if field.choices is not None and text not in ("none", "null"):
        by_lower = {one.lower(): one for one in field.choices}
        if text not in by_lower:
            raise ConfigurationError(
                f"{shown} is not one of {listing(field.choices)}.{did_you_mean(text, field.choices)}"
            )
        value = by_lower[text] if isinstance(value, str) else value
    if field.kind == "text" and (field.read is None or not isinstance(value, str)):
        return _annotated(field, value, shown) if isinstance(value, str) else value
    if isinstance(value, bool | dict | list):
        raise ConfigurationError(f"{shown} must be a string.")
    return field.read(str(value), variable) if field.read is not None else str(value)


def _number(field: SettingField, value: Any, shown: str) -> float:
    whole = field.kind == "int"
    try:
        if isinstance(value, bool | dict | list) or not math.isfinite(float(value)):
            raise ValueError(value)
        if not whole:
            made = float(value)
        elif isinstance(value, float) and value.is_integer():
            made = int(value)
        else:
            made = int(str(value))
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if whole else "a number"
        raise ConfigurationError(f"{shown} must be {what}.") from None
    if field.minimum is not None and made < field.minimum:
        raise ConfigurationError(f"{shown} must be at least {field.minimum:g}.")
    if field.maximum is not None and made > field.maximum:
        raise ConfigurationError(f"{shown} must be at most {field.maximum:g}.")
    return made


def _annotated(field: SettingField, text: str, shown: str) -> Any:
    """Convert a string to the annotated type of a field, from JSON or as pydantic reads it."""
    import pydantic

    if field.annotation is None:
        return text
    adapter: Any = pydantic.TypeAdapter(
        field.annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    )
    from_json = [adapter.validate_json] if text[:1] in ("[", "{") else []
    for read in (*from_json, adapter.validate_python):
        try:
            return read(text)
        except pydantic.ValidationError as error:
            failure = error
    first = failure.errors()[0]
    how = ", written as JSON" if first["type"] in ("list_type", "dict_type") else ""
    raise ConfigurationError(f"{shown}: {first['msg']}{how}.")


def warn_near_misses(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Warn once about `ACCELERATE_*` variables that look misspelt.

    Unknown names that resemble no known one are ignored, because they may belong to another tool.
    """
    names = {*known, PROVENANCE_VARIABLE, CONFIG_VARIABLE}
    for name in environ:
        if name.startswith("ACCELERATE_") and name not in names and name not in _warned:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.92)
            if near:
                _warned.add(name)
                warn(
                    f"Environment variable {name} is unknown and has no effect.{did_you_mean(name, near)}",
                )


_warned: set[str] = set()
