"""What a check is, and where each runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from accelerate_core.testing.lab import Lab
    from accelerate_core.testing.processes import Run

__all__ = ["Check", "Skip", "check", "checks_of"]

#: `alone`: one process, not started by a launcher. `ranks`: two, all checks in one launch.
#: `kill`: `before` is the last of that launch and dies by SIGKILL; the check runs in the next.
#: `ends`: the launch is to fail, and `judge` tells whether it failed as it should.
Place = Literal["alone", "ranks", "kill", "ends"]


class Skip(Exception):
    """Raised by a check that does not apply; the text says why, by name."""


@dataclass(frozen=True)
class Check:
    """One thing a plugin must keep.

    The function gets a `Lab`, asserts, and may return a line about what it saw. On ranks
    all of them run it.
    """

    name: str
    function: Callable[[Lab], str | None]
    place: Place
    #: The key of `supports` without which it is skipped by name.
    needs: str
    before: Callable[[Lab], None] | None = None
    judge: Callable[[Run], str] | None = None

    @property
    def doc(self) -> str:
        """What is checked, in a sentence."""
        return (self.function.__doc__ or "").strip().split("\n")[0]


#: Kind of plugin -> the modules in which its checks are, in the order they run.
_MODULES = {
    "backend": (
        "general", "configuring", "one_process", "talking", "preparing", "stepping", "keeping",
        "ending",
    ),
    "precision": ("general", "configuring", "precisions"),
    "tracker": ("general", "trackers"),
    "launcher": ("general", "configuring", "launchers"),
    "extension": ("general", "configuring", "extensions"),
}  # fmt: skip
_found: dict[str, list[tuple[tuple[str, ...], Check]]] = {}


def check(
    *kinds: str,
    place: Place = "ranks",
    needs: str = "",
    before: Callable[[Lab], None] | None = None,
    judge: Callable[[Run], str] | None = None,
) -> Callable[[Callable[[Lab], str | None]], Callable[[Lab], str | None]]:
    """Register a function as a check of these kinds of plugins; its name is the check's."""

    def register(function: Callable[[Lab], str | None]) -> Callable[[Lab], str | None]:
        made = Check(function.__name__, function, place, needs, before, judge)
        _found.setdefault(function.__module__.rpartition(".")[2], []).append((kinds, made))
        return function

    return register


def checks_of(kind: str) -> dict[str, Check]:
    """Return the checks of a kind of plugin by name, in the order they run."""
    from accelerate_core.errors import ConfigurationError, did_you_mean, listing

    if kind not in _MODULES:
        raise ConfigurationError(
            f"There is no kind {kind!r}; there are {listing(_MODULES)}.{did_you_mean(kind, _MODULES)}"
        )
    checks: dict[str, Check] = {}
    for module in _MODULES[kind]:
        importlib.import_module(f"accelerate_core.testing.suites.{module}")
        checks.update((made.name, made) for kinds, made in _found[module] if kind in kinds)
    return checks


def missing_capability(made: Check, supports: Mapping[str, Any], owns: Iterable[str]) -> str:
    """Return why a check is skipped, "" if it applies."""
    if not made.needs:
        return ""
    can = supports.get(made.needs, DEFAULTS.get(made.needs, False))
    if made.needs == "num_items":
        can = "accumulation" not in owns or supports.get("num_items", False)
    return "" if can else f"it does not declare {made.needs!r}"


#: What a backend is taken to support if it says nothing.
DEFAULTS = {"compile": True, "exact": True, "several_models": True, "gradients": True}
