"""Find the value of a setting among its sources, strongest first, and remember which won.

constructor > command line > environment > config file > detection > default.
The command line reaches a process as environment variables whose origin the
launcher wrote down, so the two share one look-up here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import typing
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate_core.config.core import CORE_SETTINGS
from accelerate_core.config.files import CONFIG_VARIABLE, ConfigFile, read_config
from accelerate_core.config.provenance import BECAUSE_VARIABLE, Because, variable_origin
from accelerate_core.config.schema import SettingField, given_fields, settings_fields
from accelerate_core.config.truth import OFF, ON, truth
from accelerate_core.errors import ConfigurationError, did_you_mean, listing


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where values may come from besides the constructor."""

    environ: Mapping[str, str]
    config: ConfigFile | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Sources:
        """Read the environment, and the config file it names, if it names one."""
        named = environ.get(CONFIG_VARIABLE)
        return cls(dict(environ), read_config(named) if named else None)


def resolve_core(
    given: Mapping[str, Any], sources: Sources, detected: Mapping[str, Because]
) -> dict[str, Because]:
    """Resolve every setting of the core.

    Args:
        given: values from the constructor; `None` stands for not given.
        detected: values the active backend or the machine suggests.
    """
    made = {}
    for field in CORE_SETTINGS:
        value, because = given.get(field.name), None
        if value is not None:
            origin = f"constructor argument {field.name}"
            because = Because(
                converted(field, value, f"{field.name}={value!r} (from {origin})"), origin
            )
        made[field.name] = because or look_up(field, sources, detected=detected)
    return made


def resolve_settings(
    cls: type[Any], given: Any, sources: Sources, *, owner: str = ""
) -> tuple[Any, dict[str, Because]]:
    """Fill the fields a settings object was not given from environment and file.

    Args:
        cls: a class made with `settings`.
        given: an instance from the constructor, or None.
        owner: the plugin's name, for the default environment names.

    Returns:
        A new instance and, per field, where its value came from.
    """
    _, section, argument = getattr(cls, "__settings_names__", ("", "", ""))
    section = section or (f"{owner}_config" if owner else "")
    origin = f"constructor argument {argument or cls.__name__}"
    because = {
        field.name: Because(getattr(given, field.name), origin)
        if field.name in given_fields(given)
        else look_up(field, sources, section)
        for field in settings_fields(cls, owner=owner)
    }
    said = {name: one for name, one in because.items() if one.origin != "default"}
    try:
        made = cls(**{name: one.value for name, one in said.items()})
    except ConfigurationError as error:
        origins = "; ".join(f"{name} from {one.origin}" for name, one in said.items())
        raise ConfigurationError(f"{error} ({origins})") from None
    because = {name: Because(getattr(made, name), one.origin) for name, one in because.items()}
    # A plugin that compares its fields with something else can name their sources.
    object.__setattr__(made, "__because__", because)
    return made, because


def look_up(
    field: SettingField,
    sources: Sources,
    section: str = "",
    detected: Mapping[str, Because] | None = None,
) -> Because:
    """Return the value of a setting that no argument gives, from the strongest source that has one.

    Raises:
        ConfigurationError: it is no value of the setting; with source and what is allowed.
    """
    for name in field.env:
        if text := sources.environ.get(name):
            origin = variable_origin(name, sources.environ)
            shown = f"{field.name}={text!r} (from {origin})"
            return Because(converted(field, text, shown, variable=name), origin)
    for name in field.yaml if sources.config is not None else ():
        key = f"{section}.{name}" if section else name
        value = typing.cast(ConfigFile, sources.config).get(key)
        if value not in (None, ""):
            where = typing.cast(ConfigFile, sources.config).where(key)
            return Because(converted(field, value, f"{key}: {value!r} ({where})"), where)
    return (detected or {}).get(field.name) or Because(field.default, "default")


def converted(field: SettingField, value: Any, shown: str, *, variable: str = "") -> Any:
    """Turn what a source says into a value of the field; `shown` is value and source, for errors.

    Raises:
        ConfigurationError: it is none; with what is allowed and the nearest right value.
    """
    text = str(value).strip().lower()
    if field.optional and text in ("none", "null"):
        return None
    if field.kind == "bool":
        if (switch := truth(value)) is None:
            raise ConfigurationError(
                f"{shown} is not a switch; allowed are {listing(ON + OFF)}.{did_you_mean(text, ON + OFF)}"
            )
        return switch
    if field.kind in ("int", "float"):
        return _number(field, value, shown)
    allowed = ("none", "null", *(one.lower() for one in field.choices or ()))
    if field.choices is not None and text not in allowed:
        raise ConfigurationError(
            f"{shown} is not one of {listing(field.choices)}.{did_you_mean(text, field.choices)}"
        )
    if field.kind == "str":
        if isinstance(value, bool | dict | list):
            raise ConfigurationError(f"{shown} must be a text.")
        said = next((one for one in field.choices or () if one.lower() == text), str(value))
        return field.read(said, variable) if field.read is not None else said
    return _annotated(field, value, shown) if isinstance(value, str) else value


def _number(field: SettingField, value: Any, shown: str) -> float:
    whole = field.kind == "int"
    try:
        if isinstance(value, bool | dict | list):
            raise TypeError(value)
        made = float(value)
        if not math.isfinite(made):
            raise ValueError(value)
        if whole:
            made = int(value) if made.is_integer() and isinstance(value, float) else int(str(value))
    except (TypeError, ValueError, OverflowError):
        what = "a whole number" if whole else "a number"
        raise ConfigurationError(f"{shown} must be {what}.") from None
    if field.minimum is not None and made < field.minimum:
        raise ConfigurationError(f"{shown} must be at least {field.minimum:g}.")
    if field.maximum is not None and made > field.maximum:
        raise ConfigurationError(f"{shown} must be at most {field.maximum:g}.")
    return made


def _annotated(field: SettingField, text: str, shown: str) -> Any:
    """Turn a text into the type of a field that is no plain one: JSON, or as pydantic reads it."""
    import pydantic

    if field.annotation is None:
        return text
    candidates: list[Any] = [text]
    if text[:1] in "[{":
        with contextlib.suppress(ValueError):
            candidates.insert(0, json.loads(text))
    adapter: Any = pydantic.TypeAdapter(
        field.annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    )
    for candidate in candidates:
        try:
            return adapter.validate_python(candidate)
        except pydantic.ValidationError as error:
            failure = error
    raise ConfigurationError(f"{shown}: {failure.errors()[0]['msg']}.")


def warn_near_misses(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """Warn once about `ACCELERATE_*` variables that look like a slip of the pen.

    Unknown ones that resemble nothing are left alone: they may be another tool's.
    """
    names = {*known, BECAUSE_VARIABLE, CONFIG_VARIABLE}
    for name in environ:
        if name.startswith("ACCELERATE_") and name not in names and name not in _warned:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.92)
            if near:
                _warned.add(name)
                warnings.warn(
                    f"Environment variable {name} is not known and ignored.{did_you_mean(name, near)}",
                    stacklevel=3,
                )


_warned: set[str] = set()
