"""The hooks that plugins may implement.

There are four kinds:

* **owner**: only the active backend implements them, and its result is used, even if it is `None`.
  They are methods of `Backend` and of its base class `TorchCollectives`, with defaults.
* **stage**: take a model and return a model. All active plugins are called, ordered by stage and then by
  plugin name.
* **broadcast**: all active plugins are called, and their results are ignored.
* **registration**: all active plugins are called, and each may contribute a result.

The first argument is `accelerator`. An implementation may leave out any argument that it doesn't need.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import pluggy

from accelerate_core.errors import PluginError, warn

if TYPE_CHECKING:
    import torch

    from accelerate_core.contract.members import (
        GradientReducer,
        ObjectKind,
        PreparedOptimizer,
        PreparePlanView,
    )
    from accelerate_core.contract.view import AcceleratorView


PROJECT = "accelerate_core"

#: Plugins for another major version are refused. Plugins for a newer minor version work with the hooks
#: that this version has.
API_VERSION = (1, 0)

Kind = Literal["owner", "stage", "broadcast", "registration"]
F = TypeVar("F", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a method of an extension as the implementation of a hook.
hookimpl = pluggy.HookimplMarker(PROJECT)

#: Name of a hook -> its kind, in the order of declaration. Importing `Backend` adds its hooks.
HOOKS: dict[str, Kind] = {}
#: Name of a hook -> the version of the contract that added it.
SINCE: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True)
class Deprecation:
    """Since when something is deprecated, what to use instead, and when it is removed.

    `on` is the date of deprecation, such as "2026-01-31". Removal is at least six months later.
    """

    since: tuple[int, int]
    instead: str
    gone_in: int
    on: str = ""


#: `hook` or `hook(argument)` -> its deprecation. A plugin that uses it gets one warning. Keys can also
#: be `Class.member` and `Class.member(parameter)` of the classes that plugins use.
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
    """Return the names of the hooks of one kind, in the order of declaration."""
    return tuple(name for name, its in HOOKS.items() if its == kind)


def is_newer(plugin: object) -> bool:
    """Return whether a plugin was written for a newer minor version of the contract."""
    return tuple(getattr(plugin, "api_version", API_VERSION)) > API_VERSION


def written_before(plugin: object, hook: str) -> bool:
    """Return whether a plugin's method only shares its name with a newer hook.

    The `api_version` of the class that defines the method counts, as a plugin may inherit from a class
    that was written for a newer version.
    """
    definer = next((cls for cls in type(plugin).__mro__ if hook in vars(cls)), type(plugin))
    version = getattr(definer, "api_version", getattr(plugin, "api_version", API_VERSION))
    return tuple(version) < SINCE[hook]


def mark_hooks(plugin: object, base: type, label: str) -> None:
    """Mark a plugin's public methods that are named like hooks as implementations of these hooks.

    A method that was written before the hook of that name existed is not marked, and a warning says so.

    Args:
        base: the core's base class for this kind of plugin. If it has a method that is named like a hook
            but isn't one (such as a precision's `autocast`), that name is not a hook here.
        label: the plugin's name for errors.

    Raises:
        PluginError: the name of a method is almost the name of a hook or of a method of `base`, and the
            class does not list it in `not_hooks`.
    """
    spec = f"{PROJECT}_spec"
    hooks = {n for n in HOOKS if not hasattr(base, n) or hasattr(getattr(base, n), spec)}
    newer = {name for name in hooks if written_before(plugin, name)}
    known = {*HOOKS, *(name for name in dir(base) if not name.startswith("_"))} - newer
    meant = {"not_hooks", *getattr(plugin, "not_hooks", ())}
    for cls in type(plugin).__mro__:
        for name in vars(cls) if cls not in base.__mro__ else ():
            value = getattr(cls, name)  # a class method in vars(cls) is not callable
            if name.startswith("_") or not callable(value) or name in meant:
                continue
            if name in newer:
                since = ".".join(map(str, SINCE[name]))
                warn(
                    f"{label} has a method {name!r}. A hook with this name has existed since version "
                    f"{since} of the contract, but the class declares an older api_version, so the "
                    f"method is not called. If it implements the hook, raise api_version to {since}. If "
                    f"not, set not_hooks = ({name!r},)."
                )
                continue
            if name in hooks:
                if not hasattr(value, f"{PROJECT}_impl"):
                    hookimpl(getattr(value, "__func__", value))
            elif name not in known and not is_newer(plugin):
                check_near_miss(name, known, label)


def check_near_miss(name: str, known: Iterable[str], label: str) -> None:
    """Refuse a method whose name looks like a misspelled hook.

    Args:
        known: names of methods that are called.
        label: name of the class for the error.

    Raises:
        PluginError: names the probable hook, and says how to keep the method's name.
    """
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.83):
        raise PluginError(
            f"{label} has a method {name!r}, which is never called. Did you mean {near[0]!r}? If the "
            f"name is intended, start it with an underscore or set not_hooks = ({name!r},) on the class."
        )


def wrong_answer(hook: str, backend: str, value: object, wanted: str) -> PluginError:
    """Return the error for an owner hook that returned an invalid value.

    Args:
        backend: the backend's name.
        wanted: what the hook must return.
    """
    return PluginError(
        f"{hook} of backend {backend!r} returned {value!r}; it must return {wanted}."
    )


class HookSpecs(Protocol):
    """The hooks that any plugin may implement. The owner hooks are methods of `Backend`."""

    # --- stages, in this order ----------------------------------------------------------------

    @_stage
    def convert(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Replace layers or parameters, for example with layers of a low precision format."""

    @_stage
    def tensor_parallel(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Split layers over ranks, for tensor parallelism."""

    @_stage
    def activation_checkpointing(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> torch.nn.Module:
        """Apply activation checkpointing."""

    @_stage
    def compile(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the model. The backend declares whether this runs before or after `prepare_model`."""

    # --- broadcast ----------------------------------------------------------------------------

    @_broadcast
    def on_start(self, accelerator: AcceleratorView) -> None:
        """The Accelerator is complete. Group, device and settings are final; nothing is prepared yet."""

    @_broadcast
    def prepare_objects(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """`prepare` was called, and the backend has prepared its models and optimizers.

        Replace or wrap optimizers with `plan.each`, or add a scheduler with `plan.add`. To run code
        before each step, register `torch.optim.Optimizer.register_step_pre_hook`. Models are final.
        """

    @_broadcast
    def on_prepared(
        self, accelerator: AcceleratorView, given: Sequence[object], prepared: Sequence[object]
    ) -> None:
        """`prepare`, or another method that prepares objects, is about to return.

        `given` are the script's objects, and `prepared` what the method returns for them.
        """

    @_broadcast
    def on_early_backward(self, accelerator: AcceleratorView, loss: torch.Tensor) -> None:
        """The script has called `backward` for the first or second time. `loss` is its argument."""

    @_broadcast
    def on_save(self, accelerator: AcceleratorView, directory: Path) -> None:
        """A checkpoint is being saved. Write the plugin's files to `directory`, which only it uses."""

    @_broadcast
    def on_load(self, accelerator: AcceleratorView, directory: Path) -> None:
        """A checkpoint is being loaded. `directory` exists only if `on_save` wrote to it."""

    @_broadcast
    def on_step_end(self, accelerator: AcceleratorView, optimizer: PreparedOptimizer) -> None:
        """An optimizer has been stepped."""

    @_broadcast
    def on_membership_change(self, accelerator: AcceleratorView) -> None:
        """The number of ranks with different data has changed. `accelerator.reshare` has run."""

    @_broadcast
    def on_free(self, accelerator: AcceleratorView) -> None:
        """`free_memory` was called. Drop all references to prepared objects."""

    @_broadcast
    def on_end(self, accelerator: AcceleratorView) -> None:
        """`end_training` was called. The process group still works."""

    @_broadcast
    def on_error(self, accelerator: AcceleratorView, error: BaseException) -> None:
        """An exception is leaving the `with Accelerator()` block."""

    # --- registration -------------------------------------------------------------------------

    @_registration
    def classify(self, accelerator: AcceleratorView, obj: object) -> ObjectKind | None:
        """Return the kind of an object passed to `prepare`, or None if this plugin doesn't know it.

        Kinds are "model", "optimizer", "scheduler", "loader" and "other".
        """

    @_registration
    def reduce_gradients(
        self, accelerator: AcceleratorView, model: torch.nn.Module
    ) -> GradientReducer | None:
        """Return what averages a prepared model's gradients instead of the backend, or None.

        Called in `prepare`, on several ranks, for each model that is trained. Only one plugin may
        return a reducer.
        """

    @_registration
    def on_first_micro_batch(self, accelerator: AcceleratorView) -> Callable[[], None] | None:
        """Return a function to call when the `accumulate` block ends, or None.

        Called once, in the first micro-batch that does not end its accumulation cycle.
        """

    @_registration
    def state_attributes(self, accelerator: AcceleratorView) -> Mapping[str, object]:
        """Return values by name. They become attributes of the Accelerator and of `accelerator.state`."""

    @_registration
    def explain(self, accelerator: AcceleratorView) -> str | None:
        """Return lines for `accelerator.explain()` about decisions made after construction, or None."""
