"""The checks of each kind of plugin, and what a check is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate_core.contract.hooks import HOOKS
from accelerate_core.plugin import ConfigurationError, did_you_mean, listing

if TYPE_CHECKING:
    from accelerate_testing.context import CheckContext
    from accelerate_testing.processes import CompletedRun

    CheckFunction = Callable[[CheckContext], str | None]

#: Kind of plugin -> the modules with its checks, in the order in which they run; `leaving` comes last.
_MODULES = {
    "backend": (
        "general", "configuring", "collectives", "preparing", "stepping", "long_runs", "fitting",
        "tuning", "saving", "ending",
    ),
    "precision": ("general", "configuring", "precisions", "fitting", "preparing", "ending"),
    "tracker": ("general", "trackers"),
    "launcher": ("general", "configuring", "launchers"),
    "extension": ("general", "configuring", "extensions", "preparing", "ending"),
    "checkpointer": ("general", "configuring", "checkpointers"),
    "loaders": ("general", "configuring", "loaders"),
}  # fmt: skip
#: Kinds of plugins for which there are checks.
SUITE_KINDS = tuple(_MODULES)
#: Kind of plugin -> the keys of `options` that its checks read.
OPTIONS = {
    "backend": ("prints",),
    "precision": ("tolerance", "optimizer", "one_model", "prints"),
    "tracker": ("read", "read_config", "init", "elsewhere", "overwrites", "resumes", "prints"),
    "launcher": ("most_ranks",),
    "extension": ("changes_training", "not_saved", "ranks_differ", "prints"),
    "checkpointer": ("target", "one_process", "damage", "prints"),
    "loaders": ("make", "prints"),
}
#: What a backend supports unless it declares something else.
_SUPPORTED = {"compile": True, "exact": True, "several_models": True, "gradients": True}
#: Hooks that many checks test.
STEP = "backward no_sync trigger_sync_in_backward optimizer_step zero_grad"
STATE = "model_state load_model_state optimizer_state load_optimizer_state save_state load_state"
SAVE = f"{STATE} on_save on_load"


@dataclass(frozen=True)
class Check:
    """One requirement for a plugin.

    Attributes:
        doc: what is checked, in a sentence.
        function: asserts, and may return a line about what it saw. All ranks run it.
        alone: whether it runs in one process that no launcher started. All other checks run on
            ranks, in one launch.
        needs: the key of `supports` without which it is skipped.
        hooks: the hooks that it tests, for the message of a failure.
        before: runs last in a launch and ends with SIGKILL; the check runs in the next launch.
        judge: for a check that must fail, alone in its launch; returns what is wrong with the failure.
        after: whether nothing runs, because it tests how the processes of the other checks ended.
    """

    name: str
    doc: str
    function: CheckFunction
    alone: bool = False
    needs: str = ""
    hooks: str = ""
    before: Callable[[CheckContext], None] | None = None
    judge: Callable[[CompletedRun], str] | None = None
    after: bool = False


_found: dict[str, list[tuple[tuple[str, ...], Check]]] = {}


def check(
    *kinds: str, alone: bool = False, on_ranks: str = "", **fields: Any
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check of these kinds of plugins, with its name and its docstring.

    Args:
        on_ranks: what the function checks on ranks. This registers a second check, NAME_on_ranks.
        fields: fields of `Check`.
    """

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__
        doc = (function.__doc__ or "").strip().split("\n")[0]
        made = [Check(name, doc, function, alone, **fields)]
        if on_ranks:
            made.append(Check(f"{name}_on_ranks", on_ranks, function, **fields))
        module = _found.setdefault(function.__module__.rpartition(".")[2], [])
        module += [(kinds, one) for one in made]
        return function

    return register


def checks_of(kind: str) -> dict[str, Check]:
    """Return the checks of a kind of plugin by name, in the order in which they run.

    Raises:
        ConfigurationError: there are no checks of that kind.
    """
    if kind not in _MODULES:
        raise ConfigurationError(
            f"There are no checks for the kind {kind!r}; there are checks for {listing(_MODULES)}."
            f"{did_you_mean(kind, _MODULES)}"
        )
    checks: dict[str, Check] = {}
    for module in (*_MODULES[kind], "leaving"):
        importlib.import_module(f"accelerate_testing.suites.{module}")
        checks.update((made.name, made) for kinds, made in _found[module] if kind in kinds)
    return checks


def check_options(kind: str, options: Iterable[str], origin: str) -> None:
    """Refuse options that no check of this kind reads, because a misspelt one would have no effect.

    Args:
        origin: where they come from, for the error.

    Raises:
        ConfigurationError: with the closest valid name.
    """
    known = OPTIONS.get(kind, ())
    for key in options:
        if key not in known:
            raise ConfigurationError(
                f"{origin} has {key!r}, which no check of a {kind} reads. It reads "
                f"{listing(known) if known else 'no options'}.{did_you_mean(key, known)}"
            )


def changed(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[str]:
    """Return the keys whose values differ, without the values, which may be secret."""
    return sorted(str(k) for k in {*now, *before} if now.get(k) != before.get(k))


def missing_capability(made: Check, supports: Mapping[str, Any], owns: Iterable[str]) -> str:
    """Return why a check is skipped; "" if it runs."""
    declared = supports.get(made.needs, _SUPPORTED.get(made.needs, False))
    core_counts = made.needs == "num_items" and "accumulation" not in owns
    if not made.needs or declared or core_counts:
        return ""
    return f"it does not declare {made.needs!r}"


def own_classes(plugin: Any) -> list[type]:
    """Return a plugin's class and its bases, without those of the core."""
    mro = getattr(plugin, "__mro__", ())
    return [cls for cls in mro if not cls.__module__.startswith("accelerate_core.")]


def own_hooks(plugin: Any) -> list[str]:
    """Return the hooks that a plugin implements itself."""
    return [hook for hook in HOOKS if any(hook in vars(cls) for cls in own_classes(plugin))]


def about(name: str, plugin: Any, kind: str = "backend", meant: Iterable[str] = ()) -> str:
    """Return which of a plugin's hooks to look at after a check has failed.

    Args:
        meant: function names from the failure, the most likely first. If none of them is a hook of
            the plugin, the hooks that the check tests are returned.
    """
    if kind in ("tracker", "launcher", "checkpointer", "loaders"):
        return ""
    mine = own_hooks(plugin)
    could = checks_of(kind)[name].hooks.split()
    classes = own_classes(plugin)
    own_package = plugin.__module__.partition(".")[0]
    # If the plugin is built on another one, the hooks that it overrides itself come first.
    for here in (
        [cls for cls in classes if cls.__module__.partition(".")[0] == own_package],
        classes,
    ):
        own = {method for cls in here for method in vars(cls)}
        seen = [hook for hook in dict.fromkeys(meant) if hook in own and hook in {*HOOKS, *could}]
        if found := seen or [hook for hook in could if hook in own]:
            return f"hooks to look at: {', '.join(found)}"
    if not could:  # the check is about metadata or settings, not about hooks
        return ""
    parts = [f"its hooks: {', '.join(mine)}"] if mine else []
    if kind == "backend":
        parts.append(f"the check tests {', '.join(could)}, which the plugin does not override")
    return "; ".join(parts)
