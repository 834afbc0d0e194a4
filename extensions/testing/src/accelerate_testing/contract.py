"""The contract as plain data: for `plugins hooks`, the docs, and the committed snapshot."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

from accelerate_core import Backend
from accelerate_core.contract.hooks import (
    API_VERSION,
    DEPRECATED,
    SINCE,
    HookSpecs,
    hooks_of_kind,
)
from accelerate_core.contract.hooks import Kind as Kind

__all__ = ["HOOK_KINDS", "contract", "deprecated", "differences", "types_of"]

#: Six months: what lies at least between a deprecation and the removal.
_BETWEEN = timedelta(days=182)

#: What the four kinds of hooks have in common, each in a line.
HOOK_KINDS: dict[Kind, str] = {
    "owner": "Exactly one answer: the active backend's. `None` is an answer.",
    "stage": "Model in, model out: every active plugin, by stage and then by name.",
    "broadcast": "Everyone is told; answers are ignored.",
    "registration": "Everyone may contribute something.",
}


def contract(public: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the version and every hook: kind, arguments, since when, and what is deprecated of it.

    Args:
        public: the classes plugins are made of, as `testing.surface` reads them; it goes in as it is.
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
                "types": types_of(signature),
                "since": list(SINCE[name]),
                "deprecated": deprecated(name),
                "doc": inspect.getdoc(function) or "",
            }
    made: dict[str, Any] = {"version": list(API_VERSION), "hooks": hooks}
    return made if public is None else {**made, "public": dict(public)}


def types_of(signature: inspect.Signature) -> dict[str, str]:
    """Return what is written as the type of each argument, and of what is returned."""
    said = {name: one.annotation for name, one in signature.parameters.items() if name != "self"}
    said["return"] = signature.return_annotation
    return {name: str(one) for name, one in said.items() if one is not inspect.Parameter.empty}


def deprecated(name: str) -> dict[str, Any]:
    """Return the entries of `DEPRECATED` about a hook or a `Class.member`, or about one argument."""
    return {
        key: {
            "since": list(one.since),
            "instead": one.instead,
            "gone_in": one.gone_in,
            "on": one.on,
        }
        for key, one in DEPRECATED.items()
        if key.split("(")[0] == name
    }


def differences(old: dict[str, Any], new: dict[str, Any], today: date | None = None) -> list[str]:
    """Return what a change of the contract breaks of its own policy, one sentence each.

    What is added needs a newer minor version. Whatever was there stays as it is until the next
    major one, which may drop what was deprecated a minor version and six months before, and
    nothing else.
    """
    change = _Change(old, new, today or date.today())
    change.version()
    change.deprecations()
    for name, hook in old["hooks"].items():
        if (its := new["hooks"].get(name)) is None:
            change.gone(name, f"Hook {name!r} is gone")
        else:
            change.hook(name, hook, its)
    for name, hook in new["hooks"].items():
        if name not in old["hooks"] and change.added(f"Hook {name!r} is new"):
            change.since(f"Hook {name!r} is new", hook["since"])
    for name, members in old.get("public", {}).items():
        for member, its in members.items():
            now = new.get("public", {}).get(name, {}).get(member)
            what = f"{name}.{member}"
            if now is None:
                change.gone(what, f"{what} is gone")
            else:
                change.member(what, its, now)
    for name, members in new.get("public", {}).items():
        for member in members:
            if member not in old.get("public", {}).get(name, {}):
                change.added(f"{name}.{member} is new")
    return change.wrong


class _Change:
    """One change of the contract, and what is wrong with it."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any], today: date) -> None:
        self.was, self.now = tuple(old["version"]), tuple(new["version"])
        self.old, self.new, self.today = old, new, today
        self.announced = _entries(old)
        self.wrong: list[str] = []

    def version(self) -> None:
        if self.now < self.was:
            self.wrong.append(
                f"The version went back from {_dotted(self.was)} to {_dotted(self.now)}."
            )

    def added(self, what: str) -> bool:
        """What is new needs a newer version."""
        if self.now > self.was:
            return True
        self.wrong.append(f"{what}: raise the minor version.")
        return False

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
            if not _named(self.new, key):
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
        if now["kind"] != was["kind"]:
            self.wrong.append(
                f"Hook {name!r} changed its kind from {was['kind']} to {now['kind']}: let it be a "
                "new hook."
            )
        if now["since"] != was["since"]:
            self.wrong.append(f"Hook {name!r}: since when it is there may not be moved.")
        for argument in was["arguments"]:
            if argument not in now["arguments"]:
                self.gone(f"{name}({argument})", f"Hook {name!r} lost its argument {argument!r}")
        if now["arguments"] != was["arguments"]:
            self.added(f"Hook {name!r} has other arguments, {now['arguments']}")
        self.types(f"Hook {name!r}", was, now)

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
        stayed = [one for one in there if one in plain]
        if stayed != [one for one in plain if one in there]:
            self.wrong.append(f"{name} has its parameters in another order, {new}.")
        for parameter in new:
            needed = not parameter.endswith("=") and not parameter.startswith("*")
            if needed and parameter not in old:
                self.wrong.append(
                    f"{name} demands the parameter {_plain(parameter)!r} from now on."
                )
        if there != plain:
            self.added(f"{name} has other parameters, {new}")


def _entries(contract: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all deprecations of a contract, by hook, `hook(argument)` or `Class.member`."""
    whole = [*contract["hooks"].values()]
    whole += [its for members in contract.get("public", {}).values() for its in members.values()]
    found: dict[str, dict[str, Any]] = {}
    for its in whole:
        said = its.get("deprecated", {})
        found.update(said if isinstance(said, dict) else {key: {} for key in said})
    return found


def _named(contract: dict[str, Any], key: str) -> bool:
    """Whether the contract has what a deprecation names."""
    name, _, argument = key.rstrip(")").partition("(")
    owner, _, member = name.rpartition(".")
    if owner:
        its = contract.get("public", {}).get(owner, {}).get(member)
        known = [_plain(one) for one in (its or {}).get("parameters", [])]
    else:
        its = contract["hooks"].get(name)
        known = (its or {}).get("arguments", [])
    return its is not None and (not argument or argument in known)


def _plain(parameter: str) -> str:
    return parameter.rstrip("=").lstrip("*")


def _day(text: Any) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
