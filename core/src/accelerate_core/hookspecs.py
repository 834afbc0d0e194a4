"""The contract: every hook a plugin may implement, of four kinds.

* **owner**: exactly one answer, the active backend's. `None` is an answer.
* **stage**: model in, model out; all active plugins, by stage and then by name.
* **broadcast**: everyone is told, answers are ignored.
* **registration**: everyone may contribute something.

`accelerator` comes first; an implementation may name any subset of the arguments.
The scope of a collective is `"data"` (ranks with different samples), `"loss"`
(ranks over which a loss is summed) or `"world"`. Tensors of collectives are flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate_core.accelerator import Accelerator

__all__ = [
    "API_VERSION",
    "DEPRECATED",
    "PROJECT",
    "Deprecation",
    "HookSpecs",
    "all_hooks",
    "hook_kind",
    "hook_since",
    "hookimpl",
    "hooks_of_kind",
]

PROJECT = "accelerate_core"

#: Another major is refused by name; a newer minor works with what both know.
API_VERSION = (1, 0)

Kind = Literal["owner", "stage", "broadcast", "registration"]
Scope = Literal["data", "loss", "world"]
F = TypeVar("F", bound=Callable[..., Any])

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_KINDS: dict[str, Kind] = {}
_SINCE: dict[str, tuple[int, int]] = {}


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
        _KINDS[function.__name__] = kind
        _SINCE[function.__name__] = since
        return hookspec(function)

    return mark


_owner, _stage, _broadcast, _registration = (
    _kind("owner"),
    _kind("stage"),
    _kind("broadcast"),
    _kind("registration"),
)


def hook_kind(name: str) -> Kind | None:
    """Return the kind of a hook, None for a name that is no hook."""
    return _KINDS.get(name)


def hook_since(name: str) -> tuple[int, int]:
    """Return the version of the contract that brought a hook."""
    return _SINCE[name]


def hooks_of_kind(kind: Kind) -> tuple[str, ...]:
    """Return the names of the hooks of one kind, in the order they are declared."""
    return tuple(name for name, its in _KINDS.items() if its == kind)


def all_hooks() -> tuple[str, ...]:
    """Return the names of all hooks, in the order they are declared."""
    return tuple(_KINDS)


class HookSpecs:
    """All hooks; a method's docstring says when it is called and what to return."""

    # --- owner: start -------------------------------------------------------------------------

    @_owner
    def init_process_group(self, accelerator: Accelerator, start: Any) -> None:
        """Start the default process group; `start` is the `GroupStart` with ranks and store."""

    @_owner
    def device(self, accelerator: Accelerator, topology: Any, cpu: bool) -> torch.device:
        """Choose and select the device of this process; called before the group starts."""
        raise AssertionError

    @_owner
    def mesh(self, accelerator: Accelerator) -> DeviceMesh | None:
        """Return the device mesh, once the group runs; None where there is none."""

    @_owner
    def new_group(
        self, accelerator: Accelerator, ranks: Sequence[int] | None, device_type: str | None
    ) -> ProcessGroup | None:
        """Return a new process group; None for `ranks` means all.

        Only its members call this. `device_type` is "cpu" for tensors in host memory, None for
        the backend's own. Who has no torch group returns None: nothing then runs on a thread.
        """

    @_owner
    def data_shard(self, accelerator: Accelerator) -> tuple[int, int]:
        """Return (index, count): which part of the data this rank reads."""
        raise AssertionError

    @_owner
    def loss_shard(self, accelerator: Accelerator) -> tuple[int, int]:
        """Return (index, count) among the ranks over which a loss is summed.

        They are those with different samples, and those with different parts of one sample.
        """
        raise AssertionError

    @_owner
    def init_model_context(self, accelerator: Accelerator) -> AbstractContextManager[Any]:
        """Return the context in which user code should construct models."""
        raise AssertionError

    @_owner
    def main_process_index(self, accelerator: Accelerator) -> int:
        """Return the rank that logs and saves."""
        raise AssertionError

    # --- owner: prepare -----------------------------------------------------------------------

    @_owner
    def prepare(self, accelerator: Accelerator, plan: Any) -> None:
        """Prepare all objects of one call: replace the entries of the `PreparePlan` in place."""

    @_owner
    def prepare_model(
        self, accelerator: Accelerator, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Wrap or change one model after all stages; it is on the device already."""
        raise AssertionError

    @_owner
    def prepare_optimizer(self, accelerator: Accelerator, optimizer: Any) -> Any:
        """Return the optimizer to be stepped; its parameters are those of the prepared model."""

    @_owner
    def prepare_scheduler(self, accelerator: Accelerator, scheduler: Any) -> Any:
        """Return the scheduler to be stepped."""

    @_owner
    def feed_device(
        self, accelerator: Accelerator, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Yield the batches on the device."""
        raise AssertionError

    @_owner
    def unwrap_model(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `prepare_model`'s wrapping, not the stages."""
        raise AssertionError

    @_owner
    def join_uneven_inputs(
        self, accelerator: Accelerator, joinables: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different steps."""
        raise AssertionError

    # --- owner: step (hot: bound once, when the Accelerator is made) --------------------------

    @_owner
    def autocast(self, accelerator: Accelerator, settings: Any) -> AbstractContextManager[Any]:
        """Return the context of mixed precision; `settings` is an `AutocastKwargs` or None."""
        raise AssertionError

    @_owner
    def scale_loss(self, accelerator: Accelerator, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss before backward (gradient scaling, not accumulation)."""
        raise AssertionError

    @_owner
    def backward(
        self, accelerator: Accelerator, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Run backward on a loss already divided by the accumulation steps and scaled."""

    @_owner
    def scale_gradients(
        self, accelerator: Accelerator, models: Sequence[torch.nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply the models' gradients by a 0-d tensor, after they were synchronised.

        Called once per cycle of which the items were counted, after the backward that
        synchronises. `factor` takes the gradients to be the mean over the loss scope; a backend
        that adds them up instead divides by the number of ranks here.
        """

    @_owner
    def no_sync(self, accelerator: Accelerator, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which backward does not reduce gradients between ranks."""
        raise AssertionError

    @_owner
    def trigger_sync_in_backward(
        self, accelerator: Accelerator, model: Any
    ) -> AbstractContextManager[Any]:
        """Return a context in which the next backward reduces, though forward ran unsynced."""
        raise AssertionError

    @_owner
    def unscale_gradients(self, accelerator: Accelerator, optimizer: Any) -> None:
        """Undo gradient scaling on one (inner) optimizer's gradients, once per step."""

    @_owner
    def clip_grad_norm(
        self,
        accelerator: Accelerator,
        parameters: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float,
    ) -> Any:
        """Clip the global norm and return it as it was before, a 0-d tensor."""

    @_owner
    def clip_grad_value(
        self, accelerator: Accelerator, parameters: Sequence[torch.Tensor], clip_value: float
    ) -> None:
        """Clip every gradient element to [-clip_value, clip_value]."""

    @_owner
    def optimizer_step(
        self, accelerator: Accelerator, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Step the inner optimizer; return False if the step was skipped (overflow)."""
        raise AssertionError

    @_owner
    def zero_grad(self, accelerator: Accelerator, optimizer: Any, set_to_none: bool) -> None:
        """Clear the gradients of the inner optimizer's parameters."""

    @_owner
    def context_parallel(
        self,
        accelerator: Accelerator,
        buffers: Sequence[torch.Tensor] | None,
        buffer_seq_dims: Sequence[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[Any]:
        """Return a context in which buffers are sharded along their sequence dimension."""
        raise AssertionError

    @_owner
    def run_schedule(self, accelerator: Accelerator, batch: Any) -> Any:
        """Run forward and backward of one batch where the engine owns both; return the loss."""

    # --- owner: talk --------------------------------------------------------------------------

    @_owner
    def gather(self, accelerator: Accelerator, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the ranks' flat tensors of k elements as one of n*k, in rank order."""
        raise AssertionError

    @_owner
    def scatter(
        self,
        accelerator: Accelerator,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        scope: Scope,
    ) -> torch.Tensor:
        """Give each rank its own part of what `src` holds."""
        raise AssertionError

    @_owner
    def all_to_all(
        self, accelerator: Accelerator, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Exchange equal pieces: piece j of rank i becomes piece i of rank j."""
        raise AssertionError

    @_owner
    def reduce(
        self, accelerator: Accelerator, tensor: torch.Tensor, op: str, scope: Scope
    ) -> torch.Tensor:
        """Combine elementwise by `sum`, `mean`, `max` or `min`; every rank gets the result."""
        raise AssertionError

    @_owner
    def broadcast(
        self, accelerator: Accelerator, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Give every rank the flat tensor of rank `src`."""
        raise AssertionError

    @_owner
    def gather_object(self, accelerator: Accelerator, obj: Any, scope: Scope) -> list[Any]:
        """Return the ranks' objects in rank order, on every rank."""
        raise AssertionError

    @_owner
    def broadcast_object(self, accelerator: Accelerator, obj: Any, src: int, scope: Scope) -> Any:
        """Give every rank the object of rank `src`."""

    @_owner
    def scatter_object(
        self, accelerator: Accelerator, objs: Sequence[Any] | None, src: int, scope: Scope
    ) -> Any:
        """Give each rank its own of the objects that `src` holds."""

    @_owner
    def barrier(self, accelerator: Accelerator, scope: Scope) -> None:
        """Return when every rank has called it."""

    # --- owner: keep --------------------------------------------------------------------------

    @_owner
    def model_state(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict `save_state` keeps; keys as the user's own model has them."""
        raise AssertionError

    @_owner
    def load_model_state(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load what `model_state` gave."""

    @_owner
    def optimizer_state(self, accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
        """Return the state dict of one inner optimizer."""
        raise AssertionError

    @_owner
    def load_optimizer_state(
        self, accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state` gave."""

    @_owner
    def consolidate(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole, unsharded state dict; ranks other than the main one may get {}."""
        raise AssertionError

    @_owner
    def save_state(
        self, accelerator: Accelerator, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write what the backend keeps beside the core's files; called on every rank, in order.

        `directory` is the backend's own inside the checkpoint and does not exist yet; `options`
        are the further arguments of `save_state`. Write now and return None; or, where `later`
        says that training goes on meanwhile, copy now and return a function that writes, which
        must not use the default group. Declare `owns={"checkpoint"}` to keep models and
        optimizers here alone.
        """

    @_owner
    def load_state(
        self, accelerator: Accelerator, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read what `save_state` wrote; the directory exists if something was written."""

    # --- stages, in this order ----------------------------------------------------------------

    @_stage
    def convert(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Replace layers or parameters (low precision formats)."""
        raise AssertionError

    @_stage
    def parallelise(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Split layers over ranks (tensor parallelism)."""
        raise AssertionError

    @_stage
    def checkpoint(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Apply activation checkpointing."""
        raise AssertionError

    @_stage
    def compile(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Compile; where this runs relative to `prepare_model` the backend declares."""
        raise AssertionError

    # --- broadcast ----------------------------------------------------------------------------

    @_broadcast
    def on_start(self, accelerator: Accelerator) -> None:
        """The Accelerator is complete: group, device and settings stand."""

    @_broadcast
    def on_save(self, accelerator: Accelerator, directory: Path) -> None:
        """A checkpoint is being written; `directory` is this contributor's own subdirectory."""

    @_broadcast
    def on_load(self, accelerator: Accelerator, directory: Path) -> None:
        """A checkpoint is being read; the directory exists if `on_save` wrote into it."""

    @_broadcast
    def on_step_end(self, accelerator: Accelerator, optimizer: Any) -> None:
        """An optimizer has been stepped."""

    @_broadcast
    def on_free(self, accelerator: Accelerator) -> None:
        """`free_memory` was called: let go of everything prepared."""

    @_broadcast
    def on_end(self, accelerator: Accelerator) -> None:
        """`end_training` was called; the process group still runs."""

    @_broadcast
    def on_error(self, accelerator: Accelerator, error: BaseException) -> None:
        """The `with Accelerator()` block is left by an exception."""

    # --- registration -------------------------------------------------------------------------

    @_registration
    def classify(self, accelerator: Accelerator, obj: Any) -> str | None:
        """Name the kind of an object passed to `prepare`: model, optimizer, scheduler, loader."""

    @_registration
    def state_attributes(self, accelerator: Accelerator) -> Mapping[str, Any]:
        """Return attributes served from `accelerator.state` and the Accelerator itself."""
        raise AssertionError
