"""The contract as plain data: for `plugins hooks`, the docs, and the committed snapshot."""

from __future__ import annotations

import inspect
from typing import Any

from accelerate_core.hookspecs import (
    API_VERSION,
    DEPRECATED,
    HookSpecs,
    hook_since,
    hooks_of_kind,
)
from accelerate_core.hookspecs import Kind as Kind

__all__ = ["KINDS", "contract", "differences"]

#: What the four kinds of hooks have in common, each in a line.
KINDS: dict[Kind, str] = {
    "owner": "Exactly one answer: the active backend's. `None` is an answer.",
    "stage": "Model in, model out: every active plugin, by stage and then by name.",
    "broadcast": "Everyone is told; answers are ignored.",
    "registration": "Everyone may contribute something.",
}


def contract() -> dict[str, Any]:
    """Return the version and every hook: kind, arguments, since when, and whether deprecated."""
    hooks = {}
    for kind in KINDS:
        for name in hooks_of_kind(kind):
            function = getattr(HookSpecs, name)
            arguments = list(inspect.signature(function).parameters)[1:]
            hooks[name] = {
                "kind": kind,
                "arguments": arguments,
                "since": list(hook_since(name)),
                "deprecated": [key for key in DEPRECATED if key.split("(")[0] == name],
                "doc": inspect.getdoc(function) or "",
            }
    return {"version": list(API_VERSION), "hooks": hooks}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return what a change of the contract breaks of its own policy, one sentence each.

    Adding a hook or an argument needs a newer minor version. Whatever was there stays until the
    next major one, which may drop what an earlier version had deprecated.
    """
    was, now = tuple(old["version"]), tuple(new["version"])
    major, minor = now[0] > was[0], now > was
    wrong = []
    if now < was:
        wrong.append(f"The version went back from {_dotted(was)} to {_dotted(now)}.")
    for name, hook in old["hooks"].items():
        its = new["hooks"].get(name)
        if its is None:
            if not major:
                wrong.append(f"Hook {name!r} is gone: that needs version {was[0] + 1}.0.")
            elif name not in hook["deprecated"]:
                wrong.append(f"Hook {name!r} is gone without having been deprecated before.")
            continue
        if its["kind"] != hook["kind"] and not major:
            wrong.append(f"Hook {name!r} changed its kind: that needs version {was[0] + 1}.0.")
        for argument in hook["arguments"]:
            if argument not in its["arguments"] and not major:
                wrong.append(
                    f"Hook {name!r} lost its argument {argument!r}: that needs version "
                    f"{was[0] + 1}.0."
                )
        if its["arguments"] != hook["arguments"] and not minor:
            wrong.append(
                f"Hook {name!r} has other arguments, {its['arguments']}: raise the minor version."
            )
    for name, hook in new["hooks"].items():
        if name not in old["hooks"]:
            if not minor:
                wrong.append(f"Hook {name!r} is new: raise the minor version.")
            elif tuple(hook["since"]) != now:
                wrong.append(f"Hook {name!r} is new: say since={now} where it is declared.")
    return wrong


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
