"""The classes plugins are made of, as plain data: what `API_VERSION` promises besides the hooks."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from accelerate_core.backend import Backend
from accelerate_core.hookspecs import all_hooks
from accelerate_core.launch.plan import LaunchPlan, Target
from accelerate_core.launch.start import Launcher
from accelerate_core.plugins.contract import deprecated
from accelerate_core.plugins.selection import Claim, Request
from accelerate_core.precision import Precision
from accelerate_core.tracking import GeneralTracker

__all__ = ["PROMISED", "surface"]

#: The classes whose public names and signatures are part of the contract.
PROMISED: tuple[type, ...] = (
    Backend, Precision, GeneralTracker, Launcher, LaunchPlan, Target, Claim, Request,
)  # fmt: skip


def surface() -> dict[str, dict[str, Any]]:
    """Return, by class, its public names: what each is, and a method's parameters.

    A parameter with a default ends with `=`. A backend's hooks are left out: they are hooks.
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
            found[field.name] = {"kind": "field"}
    hooks = all_hooks() if cls is Backend else ()
    return {
        name: {**its, "deprecated": deprecated(f"{cls.__name__}.{name}")}
        for name, its in sorted(found.items())
        if not name.startswith("_") and name not in hooks
    }


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, property):
        return {"kind": "property"}
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod"}
    kind = kinds.get(type(value), "method" if inspect.isfunction(value) else "attribute")
    if kind == "attribute":
        return {"kind": kind}
    parameters = list(inspect.signature(getattr(value, "__func__", value)).parameters.values())
    if kind != "staticmethod":
        parameters = parameters[1:]
    return {"kind": kind, "parameters": [_spelt(one) for one in parameters]}


def _spelt(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    default = "" if parameter.default is inspect.Parameter.empty else "="
    return f"{stars.get(parameter.kind, '')}{parameter.name}{default}"
