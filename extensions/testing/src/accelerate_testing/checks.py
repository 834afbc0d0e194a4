"""What a check is, and where each runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate_core.contract.hooks import HOOKS

if TYPE_CHECKING:
    from accelerate_testing.lab import Lab
    from accelerate_testing.processes import Run

__all__ = [
    "SUITE_KINDS", "OPTIONS", "Check", "Skip", "about", "changed", "check", "check_options", "checks_of",
    "missing_capability",
]  # fmt: skip

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
        "general", "configuring", "one_process", "collectives", "preparing", "stepping", "tuning",
        "saving", "ending",
    ),
    "precision": ("general", "configuring", "precisions", "preparing", "ending"),
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
    "precision": ("tolerance", "prints"),
    "tracker": ("read", "read_config", "init", "elsewhere", "overwrites"),
    "launcher": (),
    "extension": ("changes_training", "not_saved", "ranks_differ", "prints"),
    "checkpointer": ("target", "one_process", "damage"),
    "loaders": ("make",),
}
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
            f"There are no checks of a {kind}, but of {listing(_MODULES)}.{did_you_mean(kind, _MODULES)}"
        )
    checks: dict[str, Check] = {}
    for module in _MODULES[kind]:
        importlib.import_module(f"accelerate_testing.suites.{module}")
        checks.update((made.name, made) for kinds, made in _found[module] if kind in kinds)
    return checks


def check_options(kind: str, options: Mapping[str, Any], origin: str) -> None:
    """Refuse options that no check of this kind reads: a misspelt one would skip what it is for.

    Args:
        origin: where they come from, for the error.

    Raises:
        ConfigurationError: with the nearest right name.
    """
    from accelerate_core.errors import ConfigurationError, did_you_mean, listing

    known = OPTIONS.get(kind, ())
    for key in options:
        if key not in known:
            raise ConfigurationError(
                f"{origin} has {key!r}, which no check of a {kind} reads; there are "
                f"{listing(known)}.{did_you_mean(key, known)}"
            )


def changed(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[str]:
    """Return the keys whose values differ; the values may be nobody's business."""
    return sorted(str(k) for k in {*now, *before} if now.get(k) != before.get(k))


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


#: Check -> the hooks it is about, for the message of a failure.
_STEP = "backward no_sync trigger_sync_in_backward optimizer_step zero_grad"
_KEEP = "model_state load_model_state optimizer_state load_optimizer_state save_state load_state"
_KEEP_OWN = f"{_KEEP} on_save on_load"
_ABOUT = {
    "one_process": f"prepare_model {_STEP} {_KEEP} convert on_start on_step_end",
    "ranks": "data_shard loss_shard device init_process_group",
    "collectives": "gather reduce broadcast",
    "objects": "gather_object broadcast_object scatter_object",
    "pieces": "scatter all_to_all",
    "barrier": "barrier",
    "loader": "data_shard feed_device",
    "prepare": "prepare prepare_model prepare_optimizer prepare_scheduler",
    "randomness": "on_start prepare prepare_model prepare_optimizer",
    "same_start": "prepare_model",
    "gradients_meet": "backward clip_grad",
    "kinds_of_models": "prepare_model",
    "several_models": f"prepare_model {_STEP} {_KEEP}",
    "one_of_two": "no_sync trigger_sync_in_backward backward",
    "contexts": "init_model_context new_group",
    "unwrap": "unwrap_model",
    "state_dict": "consolidate",
    "compiled": "prepare_model compile",
    "training": f"prepare_model {_STEP}",
    "learning": f"prepare_model {_STEP}",
    "accumulation": f"{_STEP}",
    "branches": "backward",
    "counted_items": "scale_gradients loss_shard",
    "no_sync": "no_sync backward",
    "clip_norm": "clip_grad",
    "clip_value": "clip_grad",
    "small_gradients": "clip_grad",
    "fine_tuning": f"prepare_model {_STEP}",
    "groups": f"prepare_optimizer {_STEP} {_KEEP_OWN}",
    "calls": "optimizer_step zero_grad",
    "schedule": "optimizer_step prepare_scheduler",
    "precisions": "autocast scale_loss unscale_gradients",
    "overflow": "unscale_gradients optimizer_step",
    "join": "join_uneven_inputs",
    "save_and_load": _KEEP_OWN,
    "save_later": _KEEP_OWN,
    "resume": _KEEP_OWN,
    "kill": _KEEP_OWN,
    "save_fails": _KEEP_OWN,
    "once_more": "on_start on_end on_free check prepare_model",
    "graphs_go": "prepare prepare_model backward optimizer_step zero_grad on_step_end",
    "calls_of_models": "prepare prepare_model",
    "two_at_once": "on_start on_end",
    "error_on_one_rank": "on_start on_error on_end",
    "names_stay": "convert",
    "modes_stay": "convert",
    "evaluation": "convert autocast",
    "two_processes": f"convert on_start on_step_end on_save on_load {_STEP}",
    "errors": "on_error",
}


def about(name: str, plugin: Any, kind: str = "backend") -> str:
    """Return which of a plugin's hooks a failed check is about, or else all it has."""
    if kind in ("tracker", "launcher", "checkpointer", "loaders"):
        return ""
    own = [
        cls for cls in getattr(plugin, "__mro__", ()) if "accelerate_core." not in cls.__module__
    ]
    mine = [hook for hook in HOOKS if any(hook in vars(cls) for cls in own)]
    could = [hook for hook in _ABOUT.get(name, "").split() if kind == "backend" or hook in mine]
    meant = [hook for hook in could if hook in mine]
    if meant:
        return f"hooks to look at: {', '.join(meant)}"
    parts = [f"its hooks: {', '.join(mine)}"] if mine else []
    if could:
        parts.append(f"the check is about {', '.join(could)}, which it leaves to the core")
    return "; ".join(parts)
