"""The classes plugins are made of, as plain data: what `API_VERSION` promises besides the hooks."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.contract.hooks import HOOKS
from accelerate_core.plugins.selection import Claim, Request
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.start import FunctionLauncher, Launcher
from accelerate_testing.contract import deprecated, types_of
from accelerate_tracking import GeneralTracker

__all__ = ["PROMISED", "surface"]

#: The classes whose public names and signatures are part of the contract.
PROMISED: tuple[type, ...] = (
    Backend, Precision, GeneralTracker, Launcher, FunctionLauncher, LaunchPlan, Target, Claim, Request,
)  # fmt: skip


def surface() -> dict[str, dict[str, Any]]:
    """Return, by class, its public names: what each is, its types, and a method's parameters.

    A parameter with a default ends with `=`. Of a dataclass `__init__` is told, too: its fields in
    their order. A backend's hooks are left out: they are hooks.
    """
    return {cls.__name__: _members(cls) for cls in PROMISED}


def _members(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__[:-1]):
        for name in getattr(owner, "__annotations__", {}):
            found[name] = {"kind": "attribute"}
        for name, value in vars(owner).items():
            found[name] = _described(value)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            plain = field.default is None or isinstance(field.default, bool | int | float | str)
            found[field.name] = {
                "kind": "field",
                "types": {"value": str(field.type)},
                **({"default": repr(field.default)} if plain else {}),
            }
        found["__init__"] = _described(vars(cls)["__init__"])
    hooks = HOOKS if cls is Backend else ()
    return {
        name: {**its, "deprecated": deprecated(f"{cls.__name__}.{name}")}
        for name, its in sorted(found.items())
        if (not name.startswith("_") or _makes(cls, name)) and name not in hooks
    }


def _makes(cls: type, name: str) -> bool:
    return name == "__init__" and dataclasses.is_dataclass(cls)


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, property):
        return {"kind": "property"}
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod"}
    kind = kinds.get(type(value), "method" if inspect.isfunction(value) else "attribute")
    if kind == "attribute":
        return {"kind": kind}
    signature = inspect.signature(getattr(value, "__func__", value))
    parameters = list(signature.parameters.values())
    if kind != "staticmethod":
        parameters = parameters[1:]
    return {
        "kind": kind,
        "parameters": [_spelt(one) for one in parameters],
        "types": types_of(signature),
    }


def _spelt(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    default = "" if parameter.default is inspect.Parameter.empty else "="
    return f"{stars.get(parameter.kind, '')}{parameter.name}{default}"
