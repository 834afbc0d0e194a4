"""Declarations of a backend, and settings of a plugin."""

from __future__ import annotations

import enum
import math
import os
import tempfile
import types
import typing
import weakref
from pathlib import Path
from typing import Any

from accelerate_core.config.files import read_config
from accelerate_core.config.lookup import Sources, resolve_settings
from accelerate_core.config.schema import SettingField, settings_fields
from accelerate_core.contract.capabilities import check_reduces_gradients, check_words
from accelerate_core.errors import ConfigurationError, did_you_mean, listing
from accelerate_core.plugins.discovery import installed
from accelerate_core.utils import ProjectConfiguration
from accelerate_launch.contributed import contributed_options
from accelerate_launch.planning import make_plan
from accelerate_testing.checks import check
from accelerate_testing.lab import Lab
from accelerate_testing.processes import clean_environment

#: Keys of `supports` and of `owns` that somebody reads.
_SUPPORTS = (
    "accepts", "precisions", "mesh", "devices", "no_sync", "join", "compile", "num_items", "gradients",
    "several_models", "exact",
)  # fmt: skip
_OWNS = ("precision", "device_placement", "accumulation", "optimizer", "checkpoint")


@check("backend", place="alone")
def declarations(lab: Lab) -> str | None:
    """What it supports and owns is spelt as the core reads it, and when gradients meet is said."""
    backend = lab.found
    for attribute, known in (("supports", _SUPPORTS), ("owns", _OWNS)):
        for key in getattr(backend, attribute):
            if key not in known:
                raise AssertionError(
                    f"{attribute} has {key!r}, which nobody reads; there are {listing(known)}."
                    f"{did_you_mean(key, known)}"
                )
    lab.equal(backend.compile_at in ("before", "after", "own"), True, "compile_at is one of three")
    check_reduces_gradients(backend, lab.name, 2)
    names = [record.name for record in installed().of_kind("precision")]
    for name in backend.supports.get("precisions") or ():
        if name not in names and name != "fp8":
            raise AssertionError(f"supports the precision {name!r}; installed are {listing(names)}")
    check_words(backend.supports.get("accepts", ()), "the backend", "supports['accepts']")
    can = [key for key in _SUPPORTS if backend.supports.get(key)]
    return ", ".join([f"reduces_gradients={backend.reduces_gradients}", *can])


@check("backend", "precision", "launcher", "extension", "checkpointer", "loaders", place="alone")
def settings(lab: Lab) -> str | None:
    """Constructor, environment and config file give the same value; a wrong one is named with its source."""
    cls: Any = getattr(lab.found, "Settings", None)
    owner = lab.name
    if cls is None:
        lab.skip("it has no Settings")
    _, section, _ = getattr(cls, "__settings_names__", ("", "", ""))
    section = section or f"{owner}_config"
    tried: list[str] = []
    for field in settings_fields(cls, owner=owner):
        value = _another(cls, field)
        if value is None:
            continue
        text = str(value.value if isinstance(value, enum.Enum) else value)
        expected = getattr(cls(**{field.name: value}), field.name)
        made, because = resolve_settings(cls, None, Sources({field.env[0]: text}), owner=owner)
        lab.equal(getattr(made, field.name), expected, f"{field.name} by {field.env[0]}={text}")
        lab.equal(
            because[field.name].origin, f"environment variable {field.env[0]}", "where it came from"
        )
        made, because = resolve_settings(
            cls, None, Sources({}, _config(f"{section}:\n  {field.name}: {text}\n")), owner=owner
        )
        lab.equal(getattr(made, field.name), expected, f"{field.name} by {section}.{field.name}")
        both = Sources({field.env[0]: text})
        made, _ = resolve_settings(cls, cls(**{field.name: field.default}), both, owner=owner)
        lab.equal(getattr(made, field.name), field.default, f"{field.name} by the constructor")
        if lab.kind == "backend" and not lab.missing_device:
            _reaches_the_instance(lab, field, text, expected)
        else:
            _is_kept(lab, cls, field, value, expected)
        tried.append(field.name)
        if _kind(field) is not str:  # of which any is a value, and may be no file
            _launch_option(lab, field, text)
            _refuses(cls, field, owner)
    if not tried:
        lab.skip(f"no field of {cls.__name__} has a type of which another value is known")
    try:
        cls(**{tried[0] + "s": 1})
    except (ConfigurationError, TypeError) as error:
        lab.equal(f"Did you mean {tried[0]!r}" in str(error), True, "a misspelt field is named")
    return ", ".join(tried)


def _reaches_the_instance(lab: Lab, field: SettingField, text: str, expected: Any) -> None:
    """The backend that is made has what was resolved, as `settings`."""
    name, before = field.env[0], os.environ.get(field.env[0])
    os.environ[name] = text
    try:
        accelerator = lab.accelerator()
    except ConfigurationError:  # with other settings, perhaps
        return
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    held = getattr(accelerator.backend.settings, field.name, None)
    accelerator.end_training()
    lab.equal(held, expected, f"settings.{field.name} of the backend, by {name}={text}")


def _is_kept(lab: Lab, cls: type[Any], field: SettingField, value: Any, expected: Any) -> None:
    """The plugin keeps the settings it is made with, or reads the field while it is made."""
    read: list[str] = []

    def look(self: Any, name: str) -> Any:
        read.append(name)
        return object.__getattribute__(self, name)

    given = cls(**{field.name: value})
    watched = type(cls.__name__, (cls,), {"__slots__": (), "__getattribute__": look})
    object.__setattr__(given, "__class__", watched)
    held = weakref.ref(given)
    try:
        before = (ProjectConfiguration(), None) if lab.kind == "checkpointer" else ()
        made = lab.found(*before, given)
    except ConfigurationError:  # with other settings, perhaps
        return
    del given
    its = getattr(made, "settings", None)
    if isinstance(its, cls):
        lab.equal(getattr(its, field.name), expected, f"{field.name} of the settings it keeps")
    elif held() is None and not {field.name, "__dict__"} & set(read):
        raise AssertionError(
            f"made with {cls.__name__}({field.name}={value!r}), it neither keeps the settings (as "
            f"`self.settings`) nor reads {field.name!r}"
        )


def _kind(field: SettingField) -> Any:
    """Return the type of a field, without None; None for one of several types."""
    kind = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        plain = [one for one in typing.get_args(kind) if one is not type(None)]
        return plain[0] if len(plain) == 1 else None
    return kind


def _another(cls: type[Any], field: SettingField) -> Any:
    """Return a valid value of a field that is not its default; None if none is known."""
    kind, default = _kind(field), field.default
    candidates: list[Any] = []
    if kind is bool:
        candidates = [not default]
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
    """A text that is no value of the field is refused, naming field and variable."""
    text = "no-such-value"
    try:
        resolve_settings(cls, None, Sources({field.env[0]: text}), owner=owner)
    except ConfigurationError as error:
        for word in (field.name, field.env[0], text):
            if word not in str(error):
                raise AssertionError(
                    f"{field.env[0]}={text} is refused without naming {word!r}: {error}"
                ) from None
        return
    raise AssertionError(f"{field.env[0]}={text} is taken for a value of {field.name}")


def _launch_option(lab: Lab, field: SettingField, text: str) -> None:
    """Where `launch` has an option for the field, it hands on the same."""
    environ = clean_environment()
    options = contributed_options(environ)
    mine = next((one for one in options if not one.switch and one.env == field.env[0]), None)
    if mine is None:
        return
    given: dict[str, Any] = {mine.key: text}
    if lab.kind in ("backend", "launcher"):
        given[lab.kind] = lab.name
    elif lab.kind == "precision":
        given["mixed_precision"] = lab.name
    given.update({one.key: True for one in options if one.switch and one.env in _switches(lab)})
    plan = make_plan(__file__, (), given, environ)
    lab.equal(
        plan.environment.get(mine.env), text, f"{mine.env} by launch --{mine.field.cli[0]} {text}"
    )


def _switches(lab: Lab) -> list[str]:
    """Return the variables that ask for the plugin, and have a switch of `launch`."""
    return [f"ACCELERATE_USE_{lab.name.upper()}"] if lab.kind == "extension" else []
