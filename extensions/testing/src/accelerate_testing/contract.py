"""The contract as plain data, for `plugins hooks`, the docs and the committed snapshot."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from accelerate_core import plugin
from accelerate_core.contract.hooks import (
    API_VERSION,
    DEPRECATED,
    HOOKS,
    SINCE,
    HookSpecs,
    Kind,
    hooks_of_kind,
)
from accelerate_core.plugin import (
    Backend,
    Checkpointer,
    Claim,
    LoaderFactory,
    Precision,
    PreparedLoader,
    Request,
    RunParts,
    Tracking,
)
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.starting import FunctionLauncher, Launcher
from accelerate_tracking import GeneralTracker

#: The classes whose public names and signatures are part of the contract, in addition to the hooks.
PROMISED: tuple[type, ...] = (
    Backend, Precision, GeneralTracker, Launcher, FunctionLauncher, LaunchPlan, Target, Claim, Request,
    Checkpointer, Tracking, LoaderFactory, PreparedLoader, RunParts,
)  # fmt: skip

#: What the hooks of each kind have in common.
HOOK_KINDS: dict[Kind, str] = {
    "owner": "Only the active backend implements these, and its result is used, even if it is `None`.",
    "stage": "Each takes a model and returns one. Every active plugin is called, by stage and then by name.",
    "broadcast": "Every active plugin is called, and results are ignored.",
    "registration": "Every active plugin is called, and each may contribute a result.",
}


def contract() -> dict[str, Any]:
    """Return the version, every hook, and the public names of the classes that plugin authors use.

    Each entry has the kind, the arguments with their types, the version that introduced it, and its
    deprecations.
    """
    hooks = {}
    declared = [name for cls in Backend.__mro__ for name in vars(cls)]
    for kind in HOOK_KINDS:
        names = list(hooks_of_kind(kind))
        if kind == "owner":
            names.sort(key=declared.index)
        for name in names:
            function = getattr(Backend if kind == "owner" else HookSpecs, name)
            signature = inspect.signature(function)
            hooks[name] = {
                "kind": kind,
                "arguments": list(signature.parameters)[1:],
                "types": _types_of(signature),
                "since": list(SINCE[name]),
                "deprecated": _deprecated(name),
                "doc": inspect.getdoc(function) or "",
            }
    public = {cls.__name__: _members(cls) for cls in PROMISED}
    made = {"version": list(API_VERSION), "hooks": hooks, "public": public}
    return {**made, "plugin": sorted(dir(plugin))}  # the names that an author imports


def _types_of(signature: inspect.Signature) -> dict[str, str]:
    """Return the annotations of the arguments and of the return value, as text."""
    said = {name: one.annotation for name, one in signature.parameters.items() if name != "self"}
    said["return"] = signature.return_annotation
    return {name: str(one) for name, one in said.items() if one is not inspect.Parameter.empty}


def _deprecated(name: str) -> dict[str, Any]:
    """Return the deprecations of a hook or a `Class.member`, and of its arguments."""
    return {
        key: {**dataclasses.asdict(one), "since": list(one.since)}
        for key, one in DEPRECATED.items()
        if key.split("(")[0] == name
    }


def _members(cls: type) -> dict[str, Any]:
    """Return the public names of a class with their kinds, types and parameters.

    For a dataclass this includes `__init__`. The hooks of `Backend` are left out.
    """
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__[:-1]):
        found |= {name: {"kind": "attribute"} for name in getattr(owner, "__annotations__", {})}
        found |= {name: _described(value) for name, value in vars(owner).items()}
    public = {name for name in found if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            its = {"kind": "field", "types": {"value": str(field.type)}}
            if field.default is None or isinstance(field.default, bool | int | float | str):
                its["default"] = repr(field.default)
            found[field.name] = its
        public.add("__init__")
    return {
        name: {**found[name], "deprecated": _deprecated(f"{cls.__name__}.{name}")}
        for name in sorted(public - (HOOKS.keys() if cls is Backend else set()))
    }


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, property):
        return {"kind": "property"}
    kinds = {classmethod: "classmethod", staticmethod: "staticmethod"}
    kind = kinds.get(type(value), "method" if inspect.isfunction(value) else "attribute")
    if kind == "attribute":
        return {"kind": kind}
    signature = inspect.signature(getattr(value, "__func__", value))
    parameters = list(signature.parameters.values())[0 if kind == "staticmethod" else 1 :]
    spelt = [_spelt(one) for one in parameters]
    return {"kind": kind, "parameters": spelt, "types": _types_of(signature)}


def _spelt(parameter: inspect.Parameter) -> str:
    """Return the name of a parameter, with `=` after it if it has a default."""
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    default = "" if parameter.default is inspect.Parameter.empty else "="
    return f"{stars.get(parameter.kind, '')}{parameter.name}{default}"
