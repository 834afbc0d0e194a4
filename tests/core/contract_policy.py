"""Check a change of the contract against the policy in docs/contract.md."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

#: The shortest time between a deprecation and the removal: six months.
_BETWEEN = timedelta(days=182)


def differences(old: dict[str, Any], new: dict[str, Any], today: date | None = None) -> list[str]:
    """Return how a change of the contract breaks the policy, one sentence for each violation.

    An addition requires a newer minor version. Existing names stay unchanged until the next major
    version, which may only remove names that were deprecated at least one minor version and six
    months earlier.
    """
    change = _Change(old, new, today or date.today())
    if change.now < change.was:
        back = f"{_dotted(change.was)} to {_dotted(change.now)}"
        change.wrong.append(f"The version was lowered from {back}.")
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
    """Return a contract's hooks by name, and the public names of its classes as `Class.name`."""
    public = contract.get("public", {}).items()
    members = {f"{cls}.{name}": its for cls, all_of in public for name, its in all_of.items()}
    return {**contract["hooks"], **members}


def _entries(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all deprecations by `hook`, `hook(argument)` or `Class.member`."""
    found: dict[str, dict[str, Any]] = {}
    for its in named.values():
        deprecated = its.get("deprecated", {})
        found.update(
            deprecated if isinstance(deprecated, dict) else {key: {} for key in deprecated}
        )
    return found


class _Change:
    """A change of the contract, and the violations found in it."""

    def __init__(self, old: dict[str, Any], new: dict[str, Any], today: date) -> None:
        self.was, self.now = tuple(old["version"]), tuple(new["version"])
        self.old, self.new, self.today = _named(old), _named(new), today
        self.announced = _entries(self.old)
        self.wrong: list[str] = []

    def added(self, what: str) -> bool:
        """Require a newer version for an addition."""
        if self.now <= self.was:
            self.wrong.append(f"{what}: raise the minor version.")
        return self.now > self.was

    def since(self, what: str, declared: Any) -> None:
        """Require an addition to declare the version that introduced it."""
        if tuple(declared or ()) != self.now:
            self.wrong.append(f"{what}: add since={self.now} to its declaration.")

    def gone(self, key: str, what: str) -> None:
        """Require a newer major version for a removal, and a deprecation early enough before it."""
        if self.now[0] == self.was[0]:
            self.wrong.append(f"{what}: this requires version {self.was[0] + 1}.0.")
            return
        entry = self.announced.get(key)
        if entry is None:
            self.wrong.append(f"{what}, but was not deprecated before.")
            return
        since, day = tuple(entry.get("since", self.was)), _day(entry.get("on"))
        if entry.get("gone_in", self.now[0]) > self.now[0]:
            self.wrong.append(f"{what}, but its removal was announced for {entry['gone_in']}.0.")
        elif self.was <= since:
            self.wrong.append(
                f"{what} too early: it was deprecated in {_dotted(since)}, less than a minor version before."
            )
        elif day is None or self.today - day < _BETWEEN:
            self.wrong.append(
                f"{what} less than six months after its deprecation on {entry.get('on') or 'no date'}."
            )

    def deprecations(self) -> None:
        """Require a deprecation to state its version, its date and a future major version."""
        for key, entry in _entries(self.new).items():
            what, before = f"{key!r} is deprecated", self.announced.get(key)
            name, _, argument = key.rstrip(")").partition("(")
            its = self.new.get(name, {})
            known = its.get("arguments", [_plain(one) for one in its.get("parameters", [])])
            if not its or (argument and argument not in known):
                self.wrong.append(f"{what}, but the contract has no such name.")
            if before is not None:
                if (before.get("since"), before.get("on")) != (entry.get("since"), entry.get("on")):
                    self.wrong.append(f"{what}: its `since` and `on` cannot be changed.")
                continue
            if self.added(what):
                self.since(what, entry.get("since"))
            if entry.get("gone_in", 0) <= self.now[0]:
                self.wrong.append(
                    f"{what}: it can only be removed in {self.now[0] + 1}.0 or later."
                )
            if _day(entry.get("on")) is None:
                self.wrong.append(f"{what}: add the date, such as on='2026-01-31'.")

    def hook(self, name: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Require a hook to keep its kind, its `since` version and its arguments."""
        what = f"Hook {name!r}"
        if now["kind"] != was["kind"]:
            self.wrong.append(
                f"{what} changed its kind from {was['kind']} to {now['kind']}: add a new hook instead."
            )
        if now["since"] != was["since"]:
            self.wrong.append(f"{what}: its `since` version cannot be changed.")
        for argument in was["arguments"]:
            if argument not in now["arguments"]:
                self.gone(f"{name}({argument})", f"{what} lost its argument {argument!r}")
        if now["arguments"] != was["arguments"]:
            self.added(f"{what} now has the arguments {now['arguments']}")
        self.types(what, was, now)

    def types(self, what: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Require a newer version for a changed type. Whether it is compatible is left to the reviewer."""
        there = now.get("types", {})
        for name, old in was.get("types", {}).items():
            if name in there and there[name] != old:
                self.added(f"{what}: {name!r} changed from {old!r} to {there[name]!r}")

    def member(self, name: str, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Require a public name to keep its kind, and a method to keep its parameters."""
        if now["kind"] != was["kind"]:
            self.wrong.append(f"{name} changed from {was['kind']} to {now['kind']}.")
            return
        self.types(name, was, now)
        if now.get("default") != was.get("default"):
            self.added(
                f"{name}: the default changed from {was.get('default')} to {now.get('default')}"
            )
        old, new = was.get("parameters", []), now.get("parameters", [])
        plain, there = [_plain(one) for one in old], [_plain(one) for one in new]
        for parameter in plain:
            if parameter not in there:
                self.gone(f"{name}({parameter})", f"{name} lost its parameter {parameter!r}")
        if [one for one in there if one in plain] != [one for one in plain if one in there]:
            self.wrong.append(f"{name}: its parameters have a different order, {new}.")
        for parameter in new:
            if (
                not parameter.endswith("=")
                and not parameter.startswith("*")
                and parameter not in old
            ):
                self.wrong.append(f"{name} has a new required parameter {_plain(parameter)!r}.")
        if there != plain:
            self.added(f"{name} now has the parameters {new}")


def _plain(parameter: str) -> str:
    return parameter.rstrip("=").lstrip("*")


def _day(text: Any) -> date | None:
    try:
        return date.fromisoformat(str(text))
    except ValueError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
