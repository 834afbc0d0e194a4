"""The declarations of a backend, and the settings of any plugin."""

from __future__ import annotations

import enum
import math
import tempfile
import types
import typing
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_core.config.schema import SettingField, settings_fields
from accelerate_core.contract.capabilities import SUPPORTS, check_declarations
from accelerate_core.plugin import (
    ConfigurationError,
    RuntimeConflictError,
    Sources,
    find,
    installed,
    listing,
    read_config,
    resolve_settings,
)
from accelerate_core.utils import ProjectConfiguration
from accelerate_launch.contributed import contributed_options
from accelerate_launch.functions import patch_environment
from accelerate_launch.planning import make_plan
from accelerate_launch.schemas import plugin_schemas
from accelerate_testing.checks import check
from accelerate_testing.context import raised
from accelerate_testing.processes import clean_environment

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext


@check("backend", alone=True)
def declarations(ctx: CheckContext) -> str:
    """`supports`, `owns`, `compile_at` and `reduces_gradients` have values that the core knows."""
    backend = ctx.found
    at = backend.compile_at
    assert at in ("before", "after", "own"), f"compile_at={at!r} is not 'before', 'after' or 'own'"
    check_declarations(backend, ctx.name)
    names = [*(record.name for record in installed().of_kind("precision")), "fp8"]
    for name in backend.supports.get("precisions") or ():
        there = f"the installed precisions are {listing(names)}"
        assert name in names, f"supports has the precision {name!r}, but {there}"
    can = [key for key in SUPPORTS if backend.supports.get(key)]
    return ", ".join([f"reduces_gradients={backend.reduces_gradients}", *can])


@check("backend", "precision", "launcher", "extension", "checkpointer", "loaders", alone=True)
def settings(ctx: CheckContext) -> str:
    """Constructor, environment and config file set the same value; errors name invalid values and sources."""
    cls: Any = getattr(ctx.found, "Settings", None)
    owner = ctx.name
    if cls is None:
        ctx.skip("it has no Settings")
    _check_variables(ctx, cls)
    _, section, _ = getattr(cls, "__settings_names__", ("", "", ""))
    section = section or f"{owner}_config"
    tried: list[str] = []
    for field in settings_fields(cls, owner=owner):
        name = field.name
        value = _another(cls, field)
        if value is None or not field.env:
            continue
        variable = field.env[0]
        text = str(value.value if isinstance(value, enum.Enum) else value)
        expected = getattr(cls(**{name: value}), name)
        environ = Sources({variable: text})
        file = _config(f"{section}:\n  {name}: {text}\n")
        made, provenance = resolve_settings(cls, None, environ, owner=owner)
        ctx.equal(getattr(made, name), expected, f"{name} by {variable}={text}")
        origin = f"environment variable {variable}"
        ctx.equal(provenance[name].origin, origin, f"source of {name}")
        made, _ = resolve_settings(cls, None, Sources({}, file), owner=owner)
        ctx.equal(getattr(made, name), expected, f"{name} by {section}.{name}")
        given = cls(**{name: field.default})
        kept = getattr(given, name)  # a class may replace its default, such as None
        made, _ = resolve_settings(cls, given, environ, owner=owner)
        ctx.equal(getattr(made, name), kept, f"{name} by the constructor")
        if ctx.kind == "backend" and not ctx.placement[1]:
            _reaches_the_instance(ctx, field, text, expected)
        else:
            _is_kept(ctx, cls, field, value, expected)
        tried.append(name)
        if _kind(field) is not str:  # any text is valid then, but perhaps not as a file name
            _launch_option(ctx, field, text)
            _refuses(cls, field, owner)
    if not tried:
        ctx.skip(f"the check knows no other value for any field of {cls.__name__}")
    try:
        cls(**{tried[0] + "s": 1})
    except (ConfigurationError, TypeError) as error:
        ctx.equal(
            f"Did you mean {tried[0]!r}" in str(error), True, "the error suggests the right field"
        )
    return ", ".join(tried)


def _check_variables(ctx: CheckContext, cls: type[Any]) -> None:
    """No variable of its settings belongs to a plugin of another distribution, too."""
    homes = {(one.kind, one.name): one.distribution for one in installed().plugins}
    own = homes.get((ctx.kind, ctx.name), "")
    mine = {name for field in settings_fields(cls, owner=ctx.name) for name in field.env}
    for schema in plugin_schemas(clean_environment()):
        home = homes.get((schema.kind, schema.name), "")
        taken = sorted(mine & {name for field in schema.fields for name in field.env})
        shared = bool(taken) and _derives(ctx, schema.kind, schema.name)
        assert home in ("", own) or not taken or shared, (
            f"the variable {taken[0]} sets a value of the {schema.kind} {schema.name!r} ({home}), too: "
            f"choose another prefix, @settings(env_prefix=...)"
        )


def _derives(ctx: CheckContext, kind: str, name: str) -> bool:
    """Return whether this plugin and another one share settings on purpose, because one is a subclass."""
    own, other = (
        find(*one, source="the suite").load() for one in ((ctx.kind, ctx.name), (kind, name))
    )
    both = isinstance(own, type) and isinstance(other, type)
    return both and (issubclass(own, other) or issubclass(other, own))


def _reaches_the_instance(ctx: CheckContext, field: SettingField, text: str, expected: Any) -> None:
    """The backend has the resolved value in `settings`."""
    variable = field.env[0]
    try:
        with patch_environment(**{variable: text}):
            accelerator = ctx.accelerator()
    except (ConfigurationError, RuntimeConflictError):  # needs another setting, or a new process
        return
    held = getattr(accelerator.backend.settings, field.name, None)
    accelerator.end_training()
    ctx.equal(held, expected, f"settings.{field.name} of the backend, by {variable}={text}")


def _is_kept(
    ctx: CheckContext, cls: type[Any], field: SettingField, value: Any, expected: Any
) -> None:
    """The plugin keeps its settings, or reads the field in its constructor."""
    read: list[str] = []

    def look(self: Any, name: str) -> Any:
        read.append(name)
        return object.__getattribute__(self, name)

    given = cls(**{field.name: value})
    watched = type(cls.__name__, (cls,), {"__slots__": (), "__getattribute__": look})
    object.__setattr__(given, "__class__", watched)
    held = weakref.ref(given)
    try:
        before = (ProjectConfiguration(), None) if ctx.kind == "checkpointer" else ()
        made = ctx.found(*before, given)
    except ConfigurationError:  # perhaps it needs another setting, too
        return
    del given
    its = getattr(made, "settings", None)
    if isinstance(its, cls):
        ctx.equal(getattr(its, field.name), expected, f"{field.name} of the settings it keeps")
        return
    assert held() is not None or {field.name, "__dict__"} & {*read}, (
        f"its constructor got {cls.__name__}({field.name}={value!r}), but neither keeps the settings "
        f"(as `self.settings`) nor reads {field.name!r}"
    )


def _kind(field: SettingField) -> Any:
    """Return the type of a field, without None; None if it has several types."""
    kind = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        plain = [one for one in typing.get_args(kind) if one is not type(None)]
        return plain[0] if len(plain) == 1 else None
    return kind


def _another(cls: type[Any], field: SettingField) -> Any:
    """Return a valid value other than the default; None if the check knows none."""
    kind = _kind(field)
    default = field.default
    candidates: list[Any] = []
    if kind is bool:
        candidates = [not default]
    elif field.choices:
        candidates = list(field.choices)
    elif kind is int:
        candidates = [*range((default or 0) + 1, (default or 0) + 4), 1, 2, 0]
    elif kind is float:
        candidates = [(default or 0.0) + 0.25, (default or 0.0) / 2 + 0.125, 0.5, 1.0]
    elif kind is str:
        candidates = [f"{default or ''}x", "another"]
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        candidates = list(kind)
    elif typing.get_origin(kind) is typing.Literal:
        candidates = list(typing.get_args(kind))
    for value in candidates:
        if value == default or (isinstance(value, float) and not math.isfinite(value)):
            continue
        if field.optional and value == "none":  # this string means None
            continue
        try:
            cls(**{field.name: value})
        except ConfigurationError:
            continue
        return value
    return None


def _config(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(text, encoding="utf-8")
        return read_config(str(path))


def _refuses(cls: type[Any], field: SettingField, owner: str) -> None:
    """An invalid text is refused by an error that names the field and the variable."""
    variable, text = field.env[0], "no-such-value"
    environ = Sources({variable: text})
    told = raised(ConfigurationError, lambda: resolve_settings(cls, None, environ, owner=owner))
    assert told, f"{variable}={text} is accepted as a value of {field.name}"
    for word in (field.name, variable, text):
        assert word in str(told), f"the error for {variable}={text} does not name {word!r}: {told}"


def _launch_option(ctx: CheckContext, field: SettingField, text: str) -> None:
    """If `launch` has an option for the field, it passes on the same value."""
    environ = clean_environment()
    options = contributed_options(environ)
    mine = next((one for one in options if not one.switch and one.env == field.env[0]), None)
    if mine is None:
        return
    given: dict[str, Any] = {mine.key: text}
    if ctx.kind in ("backend", "launcher"):
        given[ctx.kind] = ctx.name
    elif ctx.kind == "precision":
        given["mixed_precision"] = ctx.name
    elif ctx.kind == "extension":
        asks = f"ACCELERATE_USE_{ctx.name.upper()}"
        given |= {one.key: True for one in options if one.switch and one.env == asks}
    handed = make_plan(__file__, (), given, environ).environment.get(mine.env)
    ctx.equal(handed, text, f"{mine.env} by launch --{mine.field.cli[0]} {text}")
