"""Compare the signatures of the drop-in with `signatures.json`, and print unlisted differences."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from typing import Any

from read_signatures import HERE, members, parameters

import accelerate_drop_in
from accelerate_core.config.enums import OpenEnum
from accelerate_drop_in.absent import DIFFERENT, left_out
from accelerate_drop_in.serving import _Absent


def split(one: str) -> tuple[str, str, str | None]:
    """Return the stars, the name and the default of a parameter from its text."""
    stars, name, default = re.fullmatch(r"(\*, |\**)(\w+)(?:=(.*))?", one, re.DOTALL).groups()  # type: ignore[union-attr]
    return stars, name, default


def same(one: str | None, other: str | None) -> bool:
    """Return whether two defaults are the same value; 0 equals 0.0."""
    return one == other or (one, other) == ("0.0", "0")


def difference(theirs: list[str] | None, ours: Any) -> str:
    """Describe calls that work only with Accelerate, "" if there are none."""
    if theirs is None or ours is None:
        return ""
    original, mine = [split(one) for one in theirs], [split(one) for one in ours]
    takes_all = {stars for stars, _, _ in mine}
    places = [name for stars, name, _ in mine if stars == ""]
    by_name = {name: (stars, default) for stars, name, default in mine if stars in ("", "*, ")}
    if {stars for stars, _, _ in original} == {"*", "**"} and len(original) == 2:
        return ""
    for index, (stars, name, default) in enumerate(original):
        if stars in ("*", "**"):
            if stars not in takes_all:
                return f"takes no {stars}{name}"
            continue
        if name not in by_name:
            if "**" not in takes_all or (stars == "" and "*" not in takes_all):
                return f"has no {name}"
            continue
        its, value = by_name[name]
        elsewhere = its or (places[index] if index < len(places) else "") != name
        if stars == "" and elsewhere and "*" not in takes_all:
            return f"{name} is not at place {index + 1}"
        if default is not None and value is None:
            return f"{name} has no default"
        if default is not None and "..." not in (default, value) and not same(value, default):
            return f"{name} is {value} by default, not {default}"
    known = {name for _, name, _ in original}
    new = [name for stars, name, value in mine if name not in known and not value and not stars]
    return f"needs {', '.join(new)}, too" if new and "*" not in takes_all else ""


def differences(theirs: Any, ours: Any) -> dict[str, str]:
    """Return the differences by member; for a function the member is ""."""
    if not isinstance(theirs, dict):
        return {"": difference(theirs, parameters(ours))}
    if not inspect.isclass(ours):
        return {"()": difference(theirs["()"], parameters(ours))}
    kinds = [ours, *([ours.core] if getattr(ours, "core", ()) != () else [])]
    listed = members(kinds[-1]) | members(ours)
    found = {}
    is_enum = issubclass(ours, enum.Enum | OpenEnum)
    asks = any(hasattr(kind, "__getattr__") for kind in kinds)
    for name, original in theirs.items():
        if name == "()":
            found[name] = "" if is_enum else difference(original, listed[name])
        elif name in listed or hasattr(ours, name):
            found[name] = difference(original, listed.get(name))
        elif original is not None or not asks:
            found[name] = "is missing"
    return found


def main() -> None:
    """Print `{"unknown": ..., "stale": ..., "compared": ...}`."""
    accelerate_drop_in.install()
    signatures = json.loads((HERE / "signatures.json").read_text(encoding="utf-8"))
    unknown, seen, compared = {}, set(), 0
    for key, theirs in signatures.items():
        module, _, name = key.rpartition(".")
        try:
            ours = getattr(importlib.import_module(f"accelerate.{module}".rstrip(".")), name)
        except AttributeError:
            if left_out(module, name) is None:
                raise
            continue  # left out, with a reason
        if isinstance(ours, _Absent):
            continue
        for member, text in differences(theirs, ours).items():
            compared += 1
            whole = f"{key}.{member}" if member not in ("", "()") else key
            listed = {whole, f"{key}.*"} & DIFFERENT.keys()
            if text and listed:
                seen |= listed
            elif text:
                unknown[whole] = text
    stale = sorted(DIFFERENT.keys() - seen)
    print(json.dumps({"unknown": unknown, "stale": stale, "compared": compared}))


if __name__ == "__main__":
    main()
