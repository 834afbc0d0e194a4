"""`Backend`: the owner hooks with defaults for one process and for torch.distributed.

A backend is a subclass that overrides what differs. Every default is right for
one process and for the default group, which is why a small backend is small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist

from accelerate_core import runtime
from accelerate_core.errors import ConfigurationError, PluginError, listing
from accelerate_core.feeding import feed
from accelerate_core.hookspecs import API_VERSION, Scope
from accelerate_core.plugins.manager import blame
from accelerate_core.plugins.selection import Claim, Request
from accelerate_core.precision import Precision, mark_hooks
from accelerate_core.torch_talk import TorchTalk, host_group

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator

__all__ = ["Backend", "Precision", "SingleProcess"]

#: Mesh dimensions whose ranks have different samples, and different terms of a loss.
_DATA = ("dp_replicate", "dp_shard")
_LOSS = (*_DATA, "cp", "sp")


class Backend:
    """Base of every backend.

    Class attributes are declarations the core, its error texts and the docs read:

    * `supports`: `precisions` (names, or None for all), `mesh` (dimension names),
      `devices` (types such as "cuda", or None for all: on another one the core does not start
      it), `no_sync`, `join`, `compile`, `num_items` (of one that owns accumulation: whether it
      can divide by a number of items), `gradients`
      (True unless False: gradients of a begun cycle are in `parameter.grad`, or saved by a
      backend that owns checkpoints; without them the last step boundary is what is saved),
      `several_models`, `exact` (True unless False: a step is that of one process on the samples
      of all ranks). The conformance suite checks what is declared and skips the rest by name.
    * `owns`: what the core leaves to this backend: `precision` (autocast of forward, scaling),
      `device_placement`, `accumulation` (dividing the loss), `optimizer` (which holds other
      tensors than the model's parameters), `checkpoint` (model and optimizer files, written in
      the hook `save_state`).
    * `compile_at`: whether the compile stage runs `before` or `after` `prepare_model`,
      or is the backend's `own`.
    """

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]] = API_VERSION
    supports: ClassVar[Mapping[str, Any]] = {}
    owns: ClassVar[frozenset[str]] = frozenset()
    compile_at: ClassVar[Literal["before", "after", "own"]] = "before"
    #: For `estimate-memory`: mode -> which of `weights`, `gradients`, `optimizer` it divides over
    #: the ranks. The mode "" is the only one, or the usual one.
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Start a process group even for one process.
    needs_group: ClassVar[bool] = False
    #: Settings class, made with `settings`.
    Settings: ClassVar[type[Any] | None] = None
    #: Further settings classes, whose fields are options of `launch` and keys of config files.
    more_settings: ClassVar[tuple[type[Any], ...]] = ()
    #: Take a mapping of names to `Settings`, too; `settings` is then a dict.
    several_settings: ClassVar[bool] = False
    #: Classes of `kwargs_handlers` this backend takes, besides `Settings`.
    handlers: ClassVar[tuple[type, ...]] = ()

    #: How tensors travel: groups for each scope.
    _talk: TorchTalk = TorchTalk()
    _mesh: Any | None = None
    _joint_meshes: Mapping[str, Any] = {}

    def __init__(self, settings: Any = None, handlers: Sequence[Any] = ()) -> None:
        self.settings = settings
        self.given_handlers = tuple(handlers)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # An override without the marker would silently not be a hook.
        mark_hooks(cls)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim this run or not; called only when one of the plugin's triggers fired."""
        return None

    def core_defaults(self) -> Mapping[str, Any]:
        """Return core settings that follow from this backend's own, such as accumulation steps.

        `parallelism_config` may be among them, with `dp_shard_size` left to the number of ranks.
        """
        return {}

    def check(self, accelerator: Accelerator) -> None:
        """Refuse a combination this backend cannot do, before anything is started."""

    def distributed_type(self, accelerator: Accelerator) -> str:
        """Return the member of `DistributedType` that user code compares with."""
        return "NO"

    # --- start --------------------------------------------------------------------------------

    def init_process_group(self, accelerator: Accelerator, start: runtime.GroupStart) -> None:
        """Start torch.distributed's default group."""
        runtime.start_group(start)

    def device(
        self, accelerator: Accelerator, topology: runtime.Topology, cpu: bool
    ) -> torch.device:
        """Take the local device of this rank, or the CPU."""
        return runtime.default_device(topology, cpu)

    def mesh(self, accelerator: Accelerator) -> Any | None:
        """Make the mesh of `parallelism_config` once; None where there is none."""
        config = accelerator.parallelism_config
        if config is None or not dist.is_initialized():
            return None
        if self._mesh is None:
            self._mesh = config.build_device_mesh(accelerator.device.type)
            self._joint_meshes = config.flatten(self._mesh)
            world = self._mesh.size()
            scopes: tuple[tuple[Scope, str], ...] = (("data", "dp"), ("loss", "dp_cp"))
            parts = {scope: self._joint_meshes[name] for scope, name in scopes}
            self._talk = TorchTalk(
                scopes={s: mesh.get_group() for s, mesh in parts.items() if mesh.size() < world}
            )
        return self._mesh

    def sub_mesh(self, name: str) -> Any:
        """Return the part of the mesh with a name: a dimension, or several together."""
        if name in self._joint_meshes:
            return self._joint_meshes[name]
        known = [
            *(self._mesh.mesh_dim_names if self._mesh is not None else ()),
            *self._joint_meshes,
        ]
        if name not in known or self._mesh is None:
            have = f"it has {listing(known)}" if known else "there is none"
            raise ConfigurationError(f"The device mesh has no {name!r}; {have}.")
        return self._mesh[name]

    def new_group(
        self, accelerator: Accelerator, ranks: Sequence[int] | None, device_type: str | None
    ) -> Any | None:
        """Make a torch.distributed group; None where there is one process."""
        if accelerator.num_processes == 1:
            return None
        timeout = accelerator.group_timeout
        if device_type == "cpu":
            return host_group(ranks, timeout)
        members = None if ranks is None else list(ranks)
        return dist.new_group(
            members, timeout=timeout, use_local_synchronization=members is not None
        )

    def data_shard(self, accelerator: Accelerator) -> tuple[int, int]:
        """Give every rank its own part; on a mesh, ranks of one tp, cp or sp group the same."""
        config = accelerator.parallelism_config
        if config is None:
            return accelerator.process_index, accelerator.num_processes
        part: tuple[int, int] = config.shard(accelerator.process_index, _DATA)
        return part

    def loss_shard(self, accelerator: Accelerator) -> tuple[int, int]:
        """Sum losses over the ranks with different samples, or different parts of a sequence."""
        config = accelerator.parallelism_config
        if config is None:
            index, count = accelerator.hooks.data_shard(accelerator)
            return index, count
        part: tuple[int, int] = config.shard(accelerator.process_index, _LOSS)
        return part

    def init_model_context(self, accelerator: Accelerator) -> AbstractContextManager[Any]:
        """Construct models as torch does."""
        return nullcontext()

    def main_process_index(self, accelerator: Accelerator) -> int:
        """Let rank 0 log and save."""
        return 0

    # --- prepare ------------------------------------------------------------------------------

    def prepare(self, accelerator: Accelerator, plan: Any) -> None:
        """Prepare models, then optimizers, then schedulers, one by one."""
        plan.each(
            "model",
            lambda model, entry: _returned(
                accelerator,
                "prepare_model",
                accelerator.hooks.prepare_model(accelerator, model, entry.evaluation_mode),
            ),
        )
        plan.rebind()
        plan.each(
            "optimizer",
            lambda optimizer, _: accelerator.hooks.prepare_optimizer(accelerator, optimizer),
        )
        plan.each(
            "scheduler",
            lambda scheduler, _: accelerator.hooks.prepare_scheduler(accelerator, scheduler),
        )

    def prepare_model(
        self, accelerator: Accelerator, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Return the model as it is."""
        return model

    def prepare_optimizer(self, accelerator: Accelerator, optimizer: Any) -> Any:
        """Return the optimizer as it is."""
        return optimizer

    def prepare_scheduler(self, accelerator: Accelerator, scheduler: Any) -> Any:
        """Return the scheduler as it is."""
        return scheduler

    def feed_device(
        self, accelerator: Accelerator, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Move the batches to the device, one ahead where it has streams."""
        return feed(batches, accelerator.device, non_blocking)

    def unwrap_model(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as it is."""
        return model

    def join_uneven_inputs(
        self, accelerator: Accelerator, joinables: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """Do nothing."""
        return nullcontext()

    # --- step ---------------------------------------------------------------------------------

    def autocast(self, accelerator: Accelerator, settings: Any) -> AbstractContextManager[Any]:
        """Enter the precision's autocast."""
        options: dict[str, Any] = {}
        if settings is not None:
            options = {"enabled": settings.enabled, "cache_enabled": settings.cache_enabled}
        try:  # in each step: no context manager around it
            return accelerator.precision.autocast(accelerator.device, options)
        except BaseException as error:
            blame(error, "autocast", accelerator._built.precision_record)
            raise

    def scale_loss(self, accelerator: Accelerator, loss: torch.Tensor) -> torch.Tensor:
        """Scale by the gradient scaler, where there is one."""
        scaler = accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    def backward(
        self, accelerator: Accelerator, loss: torch.Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Call `loss.backward(**kwargs)`."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def scale_gradients(
        self, accelerator: Accelerator, models: Sequence[torch.nn.Module], factor: torch.Tensor
    ) -> None:
        """Multiply every gradient in place, those of one device and dtype together."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in dict.fromkeys(p for model in models for p in model.parameters()):
            if parameter.grad is not None:
                grad = parameter.grad
                groups[grad.device, grad.dtype].append(grad)
        for (device, dtype), grads in groups.items():
            # Rounding it to a short format would change every gradient by the same error.
            by = factor.to(device, torch.promote_types(dtype, torch.float32))
            dense = [grad for grad in grads if not grad.is_sparse]
            if dense:
                torch._foreach_mul_(dense, by)
            for grad in grads:
                if grad.is_sparse:
                    grad.mul_(by)

    def no_sync(self, accelerator: Accelerator, model: Any) -> AbstractContextManager[Any]:
        """Do nothing: nothing is synchronised."""
        return nullcontext()

    def trigger_sync_in_backward(
        self, accelerator: Accelerator, model: Any
    ) -> AbstractContextManager[Any]:
        """Do nothing: nothing is synchronised."""
        return nullcontext()

    def unscale_gradients(self, accelerator: Accelerator, optimizer: Any) -> None:
        """Unscale one optimizer's gradients, where there is a scaler."""
        if accelerator.scaler is not None:
            accelerator.scaler.unscale_(optimizer)

    def clip_grad_norm(
        self,
        accelerator: Accelerator,
        parameters: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float,
    ) -> Any:
        """Clip with torch."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(
        self, accelerator: Accelerator, parameters: Sequence[torch.Tensor], clip_value: float
    ) -> None:
        """Clip with torch."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def optimizer_step(
        self, accelerator: Accelerator, optimizer: Any, closure: Callable[[], Any] | None
    ) -> bool:
        """Step, through the scaler where there is one; tell whether the step was taken."""
        scaler = accelerator.scaler
        if scaler is None:
            optimizer.step() if closure is None else optimizer.step(closure)
            return True
        if closure is not None:
            raise ConfigurationError("A closure cannot be used with a gradient scaler (fp16).")
        taken = _steps_taken(optimizer)
        with taken:
            scaler.step(optimizer)
        overflowed = False
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimizer is always called and leaves the step out by itself.
            overflowed = any(
                bool(found.item()) for found in scaler._found_inf_per_device(optimizer).values()
            )
        accelerator.scaler_stepped(optimizer)
        return taken.count > 0 and not overflowed

    def zero_grad(self, accelerator: Accelerator, optimizer: Any, set_to_none: bool) -> None:
        """Clear gradients."""
        optimizer.zero_grad(set_to_none=set_to_none)

    def context_parallel(
        self,
        accelerator: Accelerator,
        buffers: Sequence[torch.Tensor] | None,
        buffer_seq_dims: Sequence[int] | None,
        no_restore_buffers: set[torch.Tensor] | None,
    ) -> AbstractContextManager[Any]:
        """Do nothing: there is no such dimension."""
        return nullcontext()

    def run_schedule(self, accelerator: Accelerator, batch: Any) -> Any:
        """Refuse: forward and backward are the script's."""
        raise ConfigurationError(
            f"train_step() is for backends that own forward and backward together; under {self.name!r} "
            "call the model, accelerator.backward(loss) and optimizer.step()."
        )

    # --- talk ---------------------------------------------------------------------------------

    def gather(self, accelerator: Accelerator, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Gather over the default group."""
        return self._talk.gather(tensor, scope)

    def scatter(
        self,
        accelerator: Accelerator,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        scope: Scope,
    ) -> torch.Tensor:
        """Scatter over the default group."""
        return self._talk.scatter(parts, like, src, scope)

    def all_to_all(
        self, accelerator: Accelerator, tensor: torch.Tensor, scope: Scope
    ) -> torch.Tensor:
        """Exchange over the default group."""
        return self._talk.all_to_all(tensor, scope)

    def reduce(
        self, accelerator: Accelerator, tensor: torch.Tensor, op: Any, scope: Scope
    ) -> torch.Tensor:
        """Reduce over the default group."""
        return self._talk.reduce(tensor, op, scope)

    def broadcast(
        self, accelerator: Accelerator, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Broadcast over the default group."""
        return self._talk.broadcast(tensor, src, scope)

    def gather_object(self, accelerator: Accelerator, obj: Any, scope: Scope) -> list[Any]:
        """Gather objects over the default group."""
        return self._talk.gather_object(obj, scope)

    def broadcast_object(self, accelerator: Accelerator, obj: Any, src: int, scope: Scope) -> Any:
        """Broadcast an object over the default group."""
        return self._talk.broadcast_object(obj, src, scope)

    def scatter_object(
        self, accelerator: Accelerator, objs: Sequence[Any] | None, src: int, scope: Scope
    ) -> Any:
        """Scatter objects over the default group."""
        return self._talk.scatter_object(objs, src, scope)

    def barrier(self, accelerator: Accelerator, scope: Scope) -> None:
        """Wait for the default group."""
        self._talk.barrier(scope)

    # --- keep ---------------------------------------------------------------------------------

    def model_state(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
        """Return the unwrapped model's state dict."""
        return dict(accelerator.unwrap_model(model).state_dict())

    def load_model_state(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load into the unwrapped model."""
        accelerator.unwrap_model(model).load_state_dict(state, strict=strict)

    def optimizer_state(self, accelerator: Accelerator, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return dict(optimizer.state_dict())

    def load_optimizer_state(
        self, accelerator: Accelerator, optimizer: Any, state: Mapping[str, Any]
    ) -> None:
        """Load into the optimizer."""
        optimizer.load_state_dict(state)

    def save_state(
        self, accelerator: Accelerator, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write nothing: the core keeps models and optimizers."""
        if options:
            accelerator.note_once(
                f"The backend {self.name!r} has no use for {listing(options)} of save_state."
            )
        return None

    def load_state(
        self, accelerator: Accelerator, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read nothing."""

    def consolidate(self, accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
        """Return the unwrapped model's state dict: it is whole on every rank."""
        return dict(accelerator.unwrap_model(model).state_dict())


def _returned(accelerator: Accelerator, hook: str, value: Any) -> Any:
    if value is None:
        raise PluginError(
            f"Hook {hook!r} of the backend {accelerator.backend.name!r} returned None; it returns "
            "what is to be used from now on."
        )
    return value


class SingleProcess(Backend):
    """One process, one device: the defaults as they are."""

    name = "single"


class _steps_taken:
    """Count how often an optimizer really steps inside the block.

    `GradScaler.step` calls `optimizer.step` only when no gradient overflowed, and says
    nothing about it; torch's own step hook does, without reading the scale back. An optimizer
    that is none of torch's has its `step` replaced for the moment.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.count = 0

    def __enter__(self) -> _steps_taken:
        try:
            self._remove = self._optimizer.register_step_post_hook(self._count).remove
        except AttributeError:
            step = self._optimizer.step

            def counted(*arguments: Any, **more: Any) -> Any:
                self.count += 1
                return step(*arguments, **more)

            self._optimizer.step = counted
            self._remove = lambda: delattr(self._optimizer, "step")
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    def _count(self, *_: Any) -> None:
        self.count += 1
