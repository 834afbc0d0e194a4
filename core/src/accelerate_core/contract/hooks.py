"""The contract: every hook a plugin may implement, of four kinds.

* **owner**: exactly one answer, the active backend's. `None` is an answer. They are declared, with
  their defaults, as methods of `Backend` and of its base `TorchCollectives`.
* **stage**: model in, model out; all active plugins, by stage and then by name.
* **broadcast**: everyone is told, answers are ignored.
* **registration**: everyone may contribute something.

`accelerator` comes first; an implementation may name any subset of the arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import pluggy

from accelerate_core.errors import PluginError, warn

if TYPE_CHECKING:
    import torch

    from accelerate_core.contract.members import ObjectKind, PreparedOptimizer
    from accelerate_core.contract.view import AcceleratorView


PROJECT = "accelerate_core"

#: Another major is refused by name; a newer minor works with what both know.
API_VERSION = (1, 0)

Kind = Literal["owner", "stage", "broadcast", "registration"]
F = TypeVar("F", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a method of an extension as the implementation of a hook.
hookimpl = pluggy.HookimplMarker(PROJECT)

#: Name of a hook -> its kind, in the order they are declared; those of `Backend` once it is imported.
HOOKS: dict[str, Kind] = {}
#: Name of a hook -> the version of the contract that brought it.
SINCE: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True)
class Deprecation:
    """Since which version something is to be left, what to write instead, and when it goes.

    `on` is the day of the entry, such as "2026-01-31": six months lie between it and the removal.
    """

    since: tuple[int, int]
    instead: str
    gone_in: int
    on: str = ""


#: `hook` or `hook(argument)` -> why not to use it any more. Whoever does is told once, by name.
#: Also `Class.member` and `Class.member(parameter)` of the classes plugins are made of.
DEPRECATED: dict[str, Deprecation] = {}


def _kind(kind: Kind, since: tuple[int, int] = (1, 0)) -> Callable[[F], F]:
    def mark(function: F) -> F:
        HOOKS[function.__name__] = kind
        SINCE[function.__name__] = since
        return hookspec(function)

    return mark


owner = _kind("owner")
_stage = _kind("stage")
_broadcast = _kind("broadcast")
_registration = _kind("registration")


def hooks_of_kind(kind: Kind) -> tuple[str, ...]:
    """Return the names of the hooks of one kind, in the order they are declared."""
    return tuple(name for name, its in HOOKS.items() if its == kind)


def is_newer(plugin: object) -> bool:
    """Whether a plugin was written for a newer minor version of this contract."""
    return tuple(getattr(plugin, "api_version", API_VERSION)) > API_VERSION


def written_before(plugin: object, hook: str) -> bool:
    """Whether a plugin's method is older than the hook of its name, and so only shares the name.

    The class that defines the method counts: a plugin may inherit from a newer one.
    """
    definer = next((cls for cls in type(plugin).__mro__ if hook in vars(cls)), type(plugin))
    version = getattr(definer, "api_version", getattr(plugin, "api_version", API_VERSION))
    return tuple(version) < SINCE[hook]


def mark_hooks(plugin: object, base: type, label: str) -> None:
    """Take a plugin's public methods that are named like hooks for implementations of them.

    A method that is older than the hook of its name stays the plugin's own, with a warning.

    Args:
        base: the core's class for plugins of its kind; what that has under the name of a hook and is
            no hook there (a precision's `autocast`) is none here.
        label: the plugin's name for errors.

    Raises:
        PluginError: a method is named nearly like a hook, or like a method of `base`, and the class
            does not list it in `not_hooks`.
    """
    spec = f"{PROJECT}_spec"
    hooks = {n for n in HOOKS if not hasattr(base, n) or hasattr(getattr(base, n), spec)}
    newer = {name for name in hooks if written_before(plugin, name)}
    known = {*HOOKS, *(name for name in dir(base) if not name.startswith("_"))} - newer
    meant = {"not_hooks", *getattr(plugin, "not_hooks", ())}
    for cls in type(plugin).__mro__:
        for name in vars(cls) if cls not in base.__mro__ else ():
            value = getattr(cls, name)  # class methods are callable in this form alone
            if name.startswith("_") or not callable(value) or name in meant:
                continue
            if name in newer:
                since = ".".join(map(str, SINCE[name]))
                warn(
                    f"{label} has a method {name!r}. That is a hook since version {since} of the "
                    "contract, but the class states an older api_version, so it is not called: state "
                    f"that version if it is the hook, or not_hooks = ({name!r},) if it is not."
                )
                continue
            if name in hooks:
                if not hasattr(value, f"{PROJECT}_impl"):
                    hookimpl(getattr(value, "__func__", value))
            elif name not in known and not is_newer(plugin):
                check_near_miss(name, known, label)


def check_near_miss(name: str, known: Iterable[str], label: str) -> None:
    """Refuse a method whose name is nearly one that would be called.

    Args:
        known: names that would be called.
        label: what the class is called in the error.

    Raises:
        PluginError: with that name, and how to say that it is meant.
    """
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.83):
        raise PluginError(
            f"{label} has a method {name!r}, which nobody calls: is {near[0]!r} meant? If it is the "
            f"plugin's own, begin its name with _ or let the class say not_hooks = ({name!r},)."
        )


def wrong_answer(hook: str, backend: str, value: object, wanted: str) -> PluginError:
    """Return the error for what a backend returned from an owner hook.

    Args:
        backend: its name.
        wanted: what the hook must return.
    """
    return PluginError(
        f"{hook} of backend {backend!r} returned {value!r}; it must return {wanted}."
    )


class HookSpecs(Protocol):
    """The hooks any plugin may implement; those of a backend are the methods of `Backend`."""

    # --- stages, in this order ----------------------------------------------------------------

    @_stage
    def convert(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Replace layers or parameters (low precision formats)."""

    @_stage
    def tensor_parallel(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Split layers over ranks (tensor parallelism)."""

    @_stage
    def activation_checkpointing(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Apply activation checkpointing."""

    @_stage
    def compile(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Compile; where this runs relative to `prepare_model` the backend declares."""

    # --- broadcast ----------------------------------------------------------------------------

    @_broadcast
    def on_start(self, accelerator: AcceleratorView) -> None:
        """The Accelerator is complete: group, device and settings stand."""

    @_broadcast
    def on_save(self, accelerator: AcceleratorView, directory: Path) -> None:
        """A checkpoint is being written; `directory` is this contributor's own subdirectory."""

    @_broadcast
    def on_load(self, accelerator: AcceleratorView, directory: Path) -> None:
        """A checkpoint is being read; the directory exists if `on_save` wrote into it."""

    @_broadcast
    def on_step_end(self, accelerator: AcceleratorView, optimizer: PreparedOptimizer) -> None:
        """An optimizer has been stepped."""

    @_broadcast
    def on_free(self, accelerator: AcceleratorView) -> None:
        """`free_memory` was called: let go of everything prepared."""

    @_broadcast
    def on_end(self, accelerator: AcceleratorView) -> None:
        """`end_training` was called; the process group still runs."""

    @_broadcast
    def on_error(self, accelerator: AcceleratorView, error: BaseException) -> None:
        """The `with Accelerator()` block is left by an exception."""

    # --- registration -------------------------------------------------------------------------

    @_registration
    def classify(self, accelerator: AcceleratorView, obj: object) -> ObjectKind | None:
        """Name the kind of an object passed to `prepare`: model, optimizer, scheduler, loader."""

    @_registration
    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, object]:
        """Return attributes served from `accelerator.state` and the Accelerator itself."""

    @_registration
    def explain(self, accelerator: AcceleratorView) -> str | None:
        """Return lines for `accelerator.explain()`: what was decided since it was made."""
