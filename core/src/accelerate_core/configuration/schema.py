"""Settings classes: pydantic dataclasses that remember which fields were given.

One class is the constructor argument, the environment variables, the YAML
section, the command line options and the docs row at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform, overload

import pydantic
import pydantic.dataclasses
from pydantic import Field
from pydantic.fields import FieldInfo

from accelerate_core.errors import ConfigurationError, did_you_mean, listing

__all__ = [
    "BackendSettings",
    "KwargsHandler",
    "SettingField",
    "given_fields",
    "option",
    "origin_of",
    "settings",
    "settings_fields",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class SettingField:
    """One field of a settings class and the names under which each source knows it."""

    name: str
    annotation: Any
    default: Any
    help: str
    env: tuple[str, ...]
    cli: str
    yaml: str
    #: Other names a peer's file has for it, in its section.
    aliases: tuple[str, ...] = ()


def option(
    *,
    default: Any = dataclasses.MISSING,
    help: str = "",
    env: str | Iterable[str] = (),
    yaml: str | Iterable[str] = (),
    default_factory: Callable[[], Any] | None = None,
    **constraints: Any,
) -> Any:
    """Declare a field with a help text and, where they differ, its environment variables.

    `yaml` are further names in a config file. `constraints` are pydantic's (`ge=1`, `pattern=...`).
    """
    names = (env,) if isinstance(env, str) else tuple(env)
    extra: Any = {"env": list(names), "yaml": [yaml] if isinstance(yaml, str) else list(yaml)}
    if default_factory is not None:
        return Field(
            default_factory=default_factory,
            description=help,
            json_schema_extra=extra,
            **constraints,
        )
    if default is dataclasses.MISSING:
        return Field(description=help, json_schema_extra=extra, **constraints)
    return Field(default, description=help, json_schema_extra=extra, **constraints)


@overload
def settings(cls: type[T], /) -> type[T]: ...
@overload
def settings(
    *,
    env_prefix: str = "",
    section: str = "",
    argument: str | tuple[str, ...] = "",
    yaml_prefix: str = "",
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(option,))
def settings(
    cls: type[Any] | None = None,
    /,
    *,
    env_prefix: str = "",
    section: str = "",
    argument: str | tuple[str, ...] = "",
    yaml_prefix: str = "",
) -> Any:
    """Make a class with annotated fields a settings class.

    Args:
        env_prefix: prefix of the environment variables, default
            `ACCELERATE_<BACKEND>_` for the `Settings` of a backend.
        section: the YAML key the fields stand under.
        argument: the constructor argument of `Accelerator` that takes an instance; several names
            of it, the usual one first.
        yaml_prefix: what a peer's file puts before the keys of the section; read as well.
    """

    def make(target: type[Any]) -> type[Any]:
        config = pydantic.ConfigDict(arbitrary_types_allowed=True, validate_default=False)
        made: Any = pydantic.dataclasses.dataclass(config=config)(target)
        names_of_it = (argument,) if isinstance(argument, str) else argument
        made.__settings_names__ = (env_prefix, section, names_of_it[0])
        made.__settings_arguments__ = tuple(name for name in names_of_it if name)
        made.__yaml_prefix__ = yaml_prefix
        original = made.__init__
        signature = inspect.signature(made)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            unknown = [name for name in kwargs if name not in signature.parameters]
            if unknown:
                known = list(signature.parameters)
                raise UnknownFieldError(
                    f"{type(self).__name__} has no field {unknown[0]!r}; it has {listing(known)}."
                    f"{did_you_mean(unknown[0], known)}"
                )
            try:
                bound = signature.bind(*args, **kwargs)
                original(self, *args, **kwargs)
            except pydantic.ValidationError as error:
                raise ConfigurationError(_first_error(type(self).__name__, error)) from None
            names = frozenset(bound.arguments)
            object.__setattr__(self, "__given__", names)

        made.__init__ = __init__
        made.__signature__ = signature
        return typing.cast("type[Any]", made)

    return make if cls is None else make(cls)


class UnknownFieldError(ConfigurationError, TypeError):
    """A settings class was called with a field it does not have."""


def _first_error(owner: str, error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":  # raised by the class's own __post_init__
        return f"{owner}: {first['msg'].removeprefix('Value error, ')}"
    field = ".".join(str(part) for part in first["loc"]) or "value"
    return f"{owner}({field}={first.get('input')!r}): {first['msg']}."


class KwargsHandler:
    """Base of the objects in `kwargs_handlers`: settings that become keyword arguments."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, values copied."""
        return dataclasses.asdict(typing.cast(Any, self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults."""
        fields = dataclasses.fields(typing.cast(Any, self))
        out: dict[str, Any] = {}
        for field in fields:
            value = getattr(self, field.name)
            default = _default_of(field)
            if default is dataclasses.MISSING or (value is not default and value != default):
                out[field.name] = value
        return out


class BackendSettings(KwargsHandler):
    """Base of a backend's `Settings`."""


def given_fields(instance: Any) -> frozenset[str]:
    """Return the names of the fields that the caller passed to the constructor."""
    return typing.cast("frozenset[str]", getattr(instance, "__given__", frozenset()))


def origin_of(instance: Any, name: str) -> str:
    """Say where a field of a settings object has its value from: "default", or the source's name."""
    because = getattr(instance, "__because__", {})
    if name in because:
        return str(because[name].origin)
    given = name in given_fields(instance)
    return f"{type(instance).__name__}({name}=...)" if given else "default"


def settings_fields(cls: type[Any], *, owner: str = "") -> tuple[SettingField, ...]:
    """List the fields of a settings class; `owner` is the plugin's name, for default names."""
    prefix, _, _ = getattr(cls, "__settings_names__", ("", "", ""))
    prefix = prefix or (
        f"ACCELERATE_{owner.upper().replace('-', '_')}_" if owner else "ACCELERATE_"
    )
    hints = typing.get_type_hints(cls, include_extras=False)
    out = []
    for field in dataclasses.fields(cls):
        info = field.default if isinstance(field.default, FieldInfo) else None
        extra = info.json_schema_extra if info and isinstance(info.json_schema_extra, dict) else {}
        env = tuple(typing.cast("list[str]", extra.get("env", []))) or (
            prefix + field.name.upper(),
        )
        out.append(
            SettingField(
                name=field.name,
                annotation=hints.get(field.name, Any),
                default=_default_of(field),
                help=(info.description if info else "") or "",
                env=env,
                cli="--" + (f"{owner}_{field.name}" if owner else field.name),
                yaml=field.name,
                aliases=tuple(typing.cast("list[str]", extra.get("yaml", []))),
            )
        )
    return tuple(out)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True, validated_data={})
        return default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return default
