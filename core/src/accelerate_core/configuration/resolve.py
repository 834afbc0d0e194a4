"""Find the value of a setting among its sources, strongest first, and remember which won.

constructor > command line > environment > config file > detection > default.
The command line reaches a process as environment variables whose origin the
launcher wrote down, so the two share one look-up here.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pydantic

from accelerate_core.configuration.core import CORE_SETTINGS, Setting
from accelerate_core.configuration.files import CONFIG_VARIABLE, ConfigFile, read_config
from accelerate_core.configuration.provenance import BECAUSE_VARIABLE, Because, variable_origin
from accelerate_core.configuration.schema import SettingField, given_fields, settings_fields
from accelerate_core.configuration.truth import OFF, ON, truth
from accelerate_core.errors import ConfigurationError, did_you_mean, listing

__all__ = ["Sources", "resolve_core", "resolve_settings", "warn_near_misses"]


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
    """Resolve every core setting.

    Args:
        given: values from the constructor; `None` stands for not given.
        detected: values the active backend or the machine suggests.
    """
    return {s.name: _resolve_one(s, given.get(s.name), sources, detected) for s in CORE_SETTINGS}


def _resolve_one(
    setting: Setting, given: Any, sources: Sources, detected: Mapping[str, Because]
) -> Because:
    if given is not None:
        origin = f"constructor argument {setting.name}"
        return Because(_convert(setting, given, origin), origin)
    for name in setting.env:
        text = sources.environ.get(name)
        if text is not None and text != "":
            origin = variable_origin(name, sources.environ)
            if name == "USE_FP16":  # older name of the seeds: a flag, not a precision
                text = "fp16" if truth(text) else "no"
            return Because(_convert(setting, text, origin), origin)
    if sources.config is not None:
        for key in setting.yaml:
            if key in sources.config and sources.config[key] is not None:
                origin = sources.config.where(key)
                return Because(_convert(setting, sources.config[key], origin), origin)
    if setting.name in detected:
        return detected[setting.name]
    return Because(setting.default, "default")


def _convert(setting: Setting, value: Any, origin: str) -> Any:
    if setting.kind is bool:
        return _to_bool(setting.name, value, origin)
    try:
        made = setting.kind(value)
        if setting.kind is int and isinstance(value, float) and made != value:
            raise ValueError("not a whole number")
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(
            f"{setting.name}={value!r} (from {origin}) is not a valid {setting.kind.__name__}."
        ) from None
    if setting.minimum is not None and made < setting.minimum:
        raise ConfigurationError(
            f"{setting.name}={made} (from {origin}) must be at least {setting.minimum}."
        )
    return made.lower() if setting.name == "mixed_precision" else made


def _to_bool(name: str, value: Any, origin: str) -> bool:
    said = truth(value)
    if said is not None:
        return said
    raise ConfigurationError(
        f"{name}={value!r} (from {origin}) is not a switch; allowed are {listing(ON + OFF)}."
    )


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
    explicit = given_fields(given) if given is not None else frozenset()
    values: dict[str, Any] = {}
    because: dict[str, Because] = {}
    for field in settings_fields(cls, owner=owner):
        if field.name in explicit:
            values[field.name] = getattr(given, field.name)
            origin = f"constructor argument {argument or cls.__name__}"
        else:
            where = section or (f"{owner}_config" if owner else "")
            found = _look_up(field, sources, where, getattr(cls, "__yaml_prefix__", ""))
            if found is None:
                because[field.name] = Because(field.default, "default")
                continue
            values[field.name], origin = found
        because[field.name] = Because(values[field.name], origin)
    try:
        made = cls(**values)
    except ConfigurationError as error:
        said = "; ".join(
            f"{k} from {b.origin}" for k, b in because.items() if b.origin != "default"
        )
        raise ConfigurationError(f"{error} ({said})") from None
    for name in because:
        because[name] = Because(getattr(made, name), because[name].origin)
    # A plugin that compares its fields with something else can name their sources.
    object.__setattr__(made, "__because__", because)
    return made, because


def _look_up(
    field: SettingField, sources: Sources, section: str, prefix: str
) -> tuple[Any, str] | None:
    for name in field.env:
        text = sources.environ.get(name)
        if text is not None and text != "":
            return _parse(field, text, variable_origin(name, sources.environ)), variable_origin(
                name, sources.environ
            )
    for name in dict.fromkeys((field.yaml, prefix + field.yaml, *field.aliases)):
        key = f"{section}.{name}" if section else name
        if sources.config is not None and key in sources.config:
            return sources.config[key], sources.config.where(key)
    return None


def _parse(field: SettingField, text: str, origin: str) -> Any:
    """Turn the text of an environment variable into the field's type."""
    adapter = pydantic.TypeAdapter(
        field.annotation, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
    )
    candidates: list[Any] = [text]
    if text[:1] in "[{":
        with_json = _json_or_none(text)
        candidates = [with_json, text] if with_json is not None else candidates
    if text.lower() in ("none", "null") and type(None) in typing.get_args(field.annotation):
        return None
    if _only_bool(field.annotation):
        return _to_bool(field.name, text, origin)
    for candidate in candidates:
        try:
            return adapter.validate_python(candidate)
        except pydantic.ValidationError as error:
            failure = error
    raise ConfigurationError(
        f"{field.name}={text!r} (from {origin}): {failure.errors()[0]['msg']}."
    )


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _only_bool(annotation: Any) -> bool:
    if annotation is bool:
        return True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set(typing.get_args(annotation)) == {bool, type(None)}
    return False


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
