"""The policy of docs/contract.md, held against a change of the contract as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

#: Six months: what lies at least between a deprecation and the removal.
_BETWEEN = timedelta(days=182)


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
