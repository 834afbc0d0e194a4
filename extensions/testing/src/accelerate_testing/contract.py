"""The contract as plain data: for `plugins hooks`, the docs, and the committed snapshot."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.contract.hooks import (
    API_VERSION,
    DEPRECATED,
    HOOKS,
    SINCE,
    HookSpecs,
    Kind,
    hooks_of_kind,
)
from accelerate_core.plugins.selection import Claim, Request
from accelerate_launch.plan import LaunchPlan, Target
from accelerate_launch.start import FunctionLauncher, Launcher
from accelerate_tracking import GeneralTracker

#: The classes whose public names and signatures are part of the contract, beside the hooks.
PROMISED: tuple[type, ...] = (
    Backend, Precision, GeneralTracker, Launcher, FunctionLauncher, LaunchPlan, Target, Claim, Request,
)  # fmt: skip

#: Six months: what lies at least between a deprecation and the removal.
_BETWEEN = timedelta(days=182)

#: What the four kinds of hooks have in common, each in a line.
HOOK_KINDS: dict[Kind, str] = {
    "owner": "Exactly one answer: the active backend's. `None` is an answer.",
    "stage": "Model in, model out: every active plugin, by stage and then by name.",
    "broadcast": "Everyone is told; answers are ignored.",
    "registration": "Everyone may contribute something.",
}


def contract() -> dict[str, Any]:
    """Return the version, every hook, and the public names of the classes plugins are made of.

    Of each: kind, arguments with their types, since when, and what is deprecated of it.
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
    return {"version": list(API_VERSION), "hooks": hooks, "public": public}


def _types_of(signature: inspect.Signature) -> dict[str, str]:
    """Return what is written as the type of each argument, and of what is returned."""
    said = {name: one.annotation for name, one in signature.parameters.items() if name != "self"}
    said["return"] = signature.return_annotation
    return {name: str(one) for name, one in said.items() if one is not inspect.Parameter.empty}


def _deprecated(name: str) -> dict[str, Any]:
    """Return the entries of `DEPRECATED` about a hook or a `Class.member`, or about one argument."""
    return {
        key: {**dataclasses.asdict(one), "since": list(one.since)}
        for key, one in DEPRECATED.items()
        if key.split("(")[0] == name
    }


def _members(cls: type) -> dict[str, Any]:
    """Return the public names of a class: what each is, its types, and a method's parameters.

    Of a dataclass `__init__` is told, too: its fields in their order. A backend's hooks are left out.
    """
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__[:-1]):
        found |= {name: {"kind": "attribute"} for name in getattr(owner, "__annotations__", {})}
        found |= {name: _described(value) for name, value in vars(owner).items()}
    public = {name for name in found if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            its = found[field.name] = {"kind": "field", "types": {"value": str(field.type)}}
            if field.default is None or isinstance(field.default, bool | int | float | str):
                its["default"] = repr(field.default)
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
    """Return the name of a parameter, ending with `=` where it has a default."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    default = "" if parameter.default is inspect.Parameter.empty else "="
    return f"{stars.get(parameter.kind, '')}{parameter.name}{default}"


def differences(old: dict[str, Any], new: dict[str, Any], today: date | None = None) -> list[str]:
    """Return what a change of the contract breaks of its own policy, one sentence each.

    What is added needs a newer minor version. Whatever was there stays as it is until the next
    major one, which may drop what was deprecated a minor version and six months before, and
    nothing else.
    """
    change = _Change(old, new, today or date.today())
    if change.now < change.was:
        back = f"{_dotted(change.was)} to {_dotted(change.now)}"
        change.wrong.append(f"The version went back from {back}.")
    change.deprecations()
    for key, was in change.old.items():
        what = key if "." in key else f"Hook {key!r}"
        if key not in change.new:
            change.gone(key, f"{what} is gone")
        elif "." in key:
            change.member(key, was, change.new[key])
        else:
            change.hook(key, was, change.new[key])
    for key, now in change.new.items():
        what = f"{key} is new" if "." in key else f"Hook {key!r} is new"
        if key not in change.old and change.added(what) and "." not in key:
            change.since(what, now["since"])
    return change.wrong


def _named(contract: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a contract has: hooks by name, public names of classes as `Class.name`."""
    public = contract.get("public", {}).items()
    members = {f"{cls}.{name}": its for cls, all_of in public for name, its in all_of.items()}
    return {**contract["hooks"], **members}


def _entries(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all deprecations, by hook, `hook(argument)` or `Class.member`."""
    found: dict[str, dict[str, Any]] = {}
    for its in named.values():
        said = its.get("deprecated", {})
        found.update(said if isinstance(said, dict) else {key: {} for key in said})
    return found


class _Change:
    """One change of the contract, and what is wrong with it."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any], today: date) -> None:
        self.was, self.now = tuple(old["version"]), tuple(new["version"])
        self.old, self.new, self.today = _named(old), _named(new), today
        self.announced = _entries(self.old)
        self.wrong: list[str] = []

    def added(self, what: str) -> bool:
        """What is new needs a newer version."""
        if self.now <= self.was:
            self.wrong.append(f"{what}: raise the minor version.")
        return self.now > self.was

    def since(self, what: str, said: Any) -> None:
        """What is new says the version it came with."""
        if tuple(said or ()) != self.now:
            self.wrong.append(f"{what}: say since={self.now} where it is declared.")

    def gone(self, key: str, what: str) -> None:
        """What goes needs a newer major version, and an announcement long enough before."""
        if self.now[0] == self.was[0]:
            self.wrong.append(f"{what}: that needs version {self.was[0] + 1}.0.")
            return
        entry = self.announced.get(key)
        if entry is None:
            self.wrong.append(f"{what} without having been deprecated before.")
            return
        since, day = tuple(entry.get("since", self.was)), _day(entry.get("on"))
        if entry.get("gone_in", self.now[0]) > self.now[0]:
            self.wrong.append(f"{what}, and was to go in {entry['gone_in']}.0.")
        elif self.was <= since:
            self.wrong.append(
                f"{what}, deprecated in {_dotted(since)}: a minor version has to lie between."
            )
        elif day is None or self.today - day < _BETWEEN:
            self.wrong.append(
                f"{what}, deprecated on {entry.get('on') or 'no day'}: six months have to lie between."
            )

    def deprecations(self) -> None:
        """A deprecation is a change, too: with a version, a day, and a major version to come."""
        for key, entry in _entries(self.new).items():
            what, before = f"{key!r} is deprecated", self.announced.get(key)
            name, _, argument = key.rstrip(")").partition("(")
            its = self.new.get(name, {})
            known = its.get("arguments", [_plain(one) for one in its.get("parameters", [])])
            if not its or (argument and argument not in known):
                self.wrong.append(f"{what}, but the contract has no such name.")
            if before is not None:
                if (before.get("since"), before.get("on")) != (entry.get("since"), entry.get("on")):
                    self.wrong.append(f"{what}: since when may not be moved.")
                continue
            if self.added(what):
                self.since(what, entry.get("since"))
            if entry.get("gone_in", 0) <= self.now[0]:
                self.wrong.append(f"{what}: it can go in {self.now[0] + 1}.0 at the earliest.")
            if _day(entry.get("on")) is None:
                self.wrong.append(f"{what}: say on which day, as on='2026-01-31'.")

    def hook(self, name: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """A hook keeps its kind, since when it is there, and its arguments."""
        what = f"Hook {name!r}"
        if now["kind"] != was["kind"]:
            self.wrong.append(
                f"{what} changed its kind from {was['kind']} to {now['kind']}: let it be a new hook."
            )
        if now["since"] != was["since"]:
            self.wrong.append(f"{what}: since when it is there may not be moved.")
        for argument in was["arguments"]:
            if argument not in now["arguments"]:
                self.gone(f"{name}({argument})", f"{what} lost its argument {argument!r}")
        if now["arguments"] != was["arguments"]:
            self.added(f"{what} has other arguments, {now['arguments']}")
        self.types(what, was, now)

    def types(self, what: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """A type that is told may change with a newer version, and a reader judges whether it fits."""
        there = now.get("types", {})
        for name, old in was.get("types", {}).items():
            if name in there and there[name] != old:
                self.added(f"{what}: {name!r} is {there[name]!r} and was {old!r}")

    def member(self, name: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """A public name of a class keeps its kind; a method keeps its parameters."""
        if now["kind"] != was["kind"]:
            self.wrong.append(f"{name} changed from {was['kind']} to {now['kind']}.")
            return
        self.types(name, was, now)
        if now.get("default") != was.get("default"):
            self.added(f"{name} is {now.get('default')} by default and was {was.get('default')}")
        old, new = was.get("parameters", []), now.get("parameters", [])
        plain, there = [_plain(one) for one in old], [_plain(one) for one in new]
        for parameter in plain:
            if parameter not in there:
                self.gone(f"{name}({parameter})", f"{name} lost its parameter {parameter!r}")
        if [one for one in there if one in plain] != [one for one in plain if one in there]:
            self.wrong.append(f"{name} has its parameters in another order, {new}.")
        for parameter in new:
            if (
                not parameter.endswith("=")
                and not parameter.startswith("*")
                and parameter not in old
            ):
                self.wrong.append(
                    f"{name} demands the parameter {_plain(parameter)!r} from now on."
                )
        if there != plain:
            self.added(f"{name} has other parameters, {new}")


def _plain(parameter: str) -> str:
    return parameter.rstrip("=").lstrip("*")


def _day(text: Any) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
