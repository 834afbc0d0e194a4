"""Settings classes: pydantic dataclasses that remember which fields were given.

The same class defines the constructor argument, environment variables, YAML section, command line options
and documentation of a group of settings.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform, overload

from accelerate_core import failures
from accelerate_core.config.shown import Shown
from accelerate_core.errors import ConfigurationError, did_you_mean, listing

if TYPE_CHECKING:
    import pydantic


@dataclasses.dataclass(frozen=True)
class SettingField:
    """A setting of the core or of a plugin, with its names in each source."""

    name: str
    #: How to parse a string: "bool", "int", "float", "str", or "text" for other types.
    kind: str
    default: Any
    help: str
    #: Environment variables, the current name first.
    env: tuple[str, ...]
    #: Options of `launch`, without dashes. The help shows the first.
    cli: tuple[str, ...]
    #: Keys in its section of a config file, the preferred one first.
    yaml: tuple[str, ...]
    #: Allowed values, ignoring case, or None for any value.
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    #: The question that `config` asks, and the condition under which it asks (`field=value`).
    ask: str = ""
    ask_if: str = ""
    #: Heading in the help of `launch`.
    group: str = ""
    #: The type of the field, or None if its class is not imported.
    annotation: Any = None
    #: `read(text, variable)` converts a string. The variable is "" for other sources.
    read: Callable[[str, str], Any] | None = None

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in typing.get_args(self.annotation)


def option(
    *,
    default: Any = dataclasses.MISSING,
    help: str = "",
    env: str | Iterable[str] | None = None,
    key: str | None = None,
    yaml: str | Iterable[str] = (),
    cli: str | Iterable[str] | None = None,
    choices: Iterable[str] = (),
    ask: str = "",
    ask_if: str = "",
    read: Callable[[str, str], Any] | None = None,
    default_factory: Any = dataclasses.MISSING,
    per_rank: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a field with a help text and additional names.

    Args:
        default: the value if no source sets one.
        help: the help text.
        env: its environment variables, the current name first; () for none. The default is the name of the
            field with the prefix of its class.
        key: its key in a config file, or "" for none. The default is the name of the field.
        yaml: additional keys in a config file, which are also options of `launch`.
        cli: additional options of `launch` only, or () for no options at all.
        choices: the allowed values in a file or on the command line, ignoring case.
        ask: the question that `accelerate-core config` asks.
        ask_if: ask it only under this condition, `other_field=value`.
        read: `read(text, variable)` converts a string to the value.
        default_factory: creates the default for each instance.
        per_rank: whether ranks may have different values. Otherwise starting with different ones fails.
        constraints: pydantic's constraints (`ge=1`, `pattern=...`).
    """
    said: dict[str, Any] = {"env": env, "cli": cli, "yaml": _tuple(yaml), "key": key, "read": read}
    said |= {name: _tuple(said[name]) for name in ("env", "cli") if said[name] is not None}
    said |= {"choices": tuple(choices), "ask": ask, "ask_if": ask_if, "per_rank": per_rank}
    given: Any = {"default": default, "default_factory": default_factory}
    metadata = {"description": help, "setting": said, **constraints}
    return dataclasses.field(**given, metadata=metadata)


def _tuple(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


C = TypeVar("C")


@overload
def settings(cls: type[C], /) -> type[C]: ...
@overload
def settings(
    *,
    env_prefix: str | None = "",
    section: str | None = "",
    argument: str | tuple[str, ...] = "",
    yaml_prefix: str = "",
) -> Callable[[type[C]], type[C]]: ...
@dataclass_transform(field_specifiers=(option,))
def settings(
    cls: Any = None,
    /,
    *,
    env_prefix: str | None = "",
    section: str | None = "",
    argument: str | tuple[str, ...] = "",
    yaml_prefix: str = "",
) -> Any:
    """Turn a class with annotated fields into a settings class.

    Args:
        env_prefix: prefix of the environment variables, default
            `ACCELERATE_<BACKEND>_` for the `Settings` of a backend; None for only the variables
            that a field names.
        section: the YAML section of the fields; None for the top level of the file.
        argument: the constructor argument of `Accelerator` that takes an instance, or several names
            for it, the preferred one first.
        yaml_prefix: a prefix that Hugging Face Accelerate's config files put before the keys of the section.
            Keys are accepted with and without it.

    Raises:
        ConfigurationError: an instance is created with a value that is not allowed.
        UnknownFieldError: an instance is created with a field that the class does not have.
    """

    def make(target: type[Any]) -> Any:
        made: Any = dataclasses.dataclass(target)
        made.__settings_names__ = (env_prefix, section, _tuple(argument)[0])
        made.__settings_arguments__ = tuple(filter(None, _tuple(argument)))
        made.__yaml_prefix__ = yaml_prefix
        # `__module__` may be changed later, to pickle a class by another name.
        made.__settings_module__ = target.__module__
        # Use `__init__`, because the signature of the class could come from a base settings class.
        signature = inspect.signature(types.MethodType(made.__init__, made))
        checked: list[Any] = []  # the class with pydantic's checks, after the first instance

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            failures.report_uncaught()
            # Import pydantic here, because it takes a tenth of a second, which `--help` should not pay.
            import pydantic.dataclasses
            import pydantic_core

            unknown = [name for name in kwargs if name not in signature.parameters]
            if unknown:
                known = list(signature.parameters)
                raise UnknownFieldError(
                    f"{type(self).__name__} has no field {unknown[0]!r}; it has {listing(known)}."
                    f"{did_you_mean(unknown[0], known)}"
                )
            bound = signature.bind(*args, **kwargs)
            if not checked:
                config = pydantic.ConfigDict(arbitrary_types_allowed=True)
                checked.append(pydantic.dataclasses.dataclass(config=config)(made))
            try:
                checked[0].__pydantic_validator__.validate_python(
                    pydantic_core.ArgsKwargs((), bound.arguments), self_instance=self
                )
            except pydantic.ValidationError as error:
                raise ConfigurationError(_first_error(type(self).__name__, error)) from None
            object.__setattr__(self, "__given__", frozenset(bound.arguments))

        made.__init__ = __init__
        made.__signature__ = signature
        made._rows = _rows
        made._repr_html_ = Shown._repr_html_
        made.__rich__ = Shown.__rich__
        return made

    return make if cls is None else make(cls)


class UnknownFieldError(ConfigurationError, TypeError):
    """A settings class was called with a field it does not have.

    Cause: a misspelt field, or a field of another version.
    Fix: use one of the fields that the message lists.
    """


def _first_error(owner: str, error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "value_error":  # raised by the class's own __post_init__
        return f"{owner}: {first['msg'].removeprefix('Value error, ')}"
    field = ".".join(str(part) for part in first["loc"]) or "value"
    hint = did_you_mean(
        first["input"], re.findall("'(.*?)'", first.get("ctx", {}).get("expected", ""))
    )
    return f"{owner}({field}={first.get('input')!r}): {first['msg']}.{hint}"


class KwargsHandler:
    """Base class of the objects in `kwargs_handlers`, whose fields become keyword arguments."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, with copied values."""
        return dataclasses.asdict(typing.cast(Any, self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(typing.cast(Any, self)):
            value, default = getattr(self, field.name), _default_of(field)
            if value is not default and value != default:
                out[field.name] = value
        return out


class BackendSettings(KwargsHandler):
    """Base class of a backend's `Settings`."""


def given_fields(instance: Any) -> frozenset[str]:
    """Return the names of the fields that the caller passed to the constructor."""
    return typing.cast("frozenset[str]", getattr(instance, "__given__", frozenset()))


def origin_of(instance: Any, name: str) -> str:
    """Return the source of a field's value in a settings object, or "default".

    Args:
        instance: a settings object.
    """
    provenance = getattr(instance, "__provenance__", {})
    if name in provenance:
        return str(provenance[name].origin)
    return f"{type(instance).__name__}({name}=...)" if name in given_fields(instance) else "default"


def _rows(self: Any) -> list[tuple[str, str, str]]:
    names = [field.name for field in dataclasses.fields(self)]
    return [(name, repr(getattr(self, name)), origin_of(self, name)) for name in names]


_KINDS = {bool: "bool", int: "int", float: "float", str: "str"}


def settings_fields(cls: type[Any], *, owner: str = "") -> tuple[SettingField, ...]:
    """List the fields of a settings class. `owner` is the plugin's name, for default names."""
    prefix, _, _ = getattr(cls, "__settings_names__", ("", "", ""))
    if prefix == "":
        prefix = f"ACCELERATE_{owner.upper().replace('-', '_')}_" if owner else "ACCELERATE_"
    file_prefix = getattr(cls, "__yaml_prefix__", "")
    before = file_prefix or (f"{owner}_" if owner else "")
    hints = typing.get_type_hints(cls, include_extras=False)
    out = []
    for field in dataclasses.fields(cls):
        said = field.metadata.get("setting", {})
        key = field.name if said.get("key") is None else said["key"]
        own = before + field.name.removeprefix(before)
        annotation = hints.get(field.name, Any)
        keys = (file_prefix + key.removeprefix(file_prefix), key) if key else ()
        more, cli = said.get("yaml", ()), said.get("cli")
        usual = () if prefix is None else (prefix + field.name.upper(),)
        out.append(
            SettingField(
                name=field.name,
                kind=_KINDS.get(_without_none(annotation), "text"),
                default=_default_of(field),
                help=field.metadata.get("description", ""),
                env=usual if said.get("env") is None else said["env"],
                cli=() if cli == () else tuple(dict.fromkeys((*(cli or ()), *more, own))),
                yaml=tuple(dict.fromkeys((*keys, *more))),
                choices=said.get("choices") or _choices(_without_none(annotation)),
                minimum=field.metadata.get("ge"),
                maximum=field.metadata.get("le"),
                ask=said.get("ask", ""),
                ask_if=said.get("ask_if", ""),
                annotation=annotation,
                read=said.get("read"),
            )
        )
    return tuple(out)


def per_rank_fields(plugin: Any) -> set[str]:
    """Return the names of a plugin's settings that may differ between ranks."""
    fields = dataclasses.fields(plugin.Settings)
    return {field.name for field in fields if field.metadata.get("setting", {}).get("per_rank")}


def _without_none(annotation: Any) -> Any:
    """Return X for `X | None`, and any other annotation unchanged."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return parts[0] if is_union and len(parts) == 1 else annotation


def _choices(annotation: Any) -> tuple[str, ...] | None:
    """Return the values of a `Literal` or an enumeration as strings."""
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(map(str, typing.get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return tuple(str(member.value) for member in annotation)
    return None


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
