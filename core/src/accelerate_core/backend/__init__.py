"""`Backend`: the owner hooks, with defaults for one process and for torch.distributed.

A backend subclasses `Backend` and overrides what differs. The defaults work for one process and for
torch.distributed's default group, so a simple backend stays short. This module has the declarations and
the hooks for the start, `prepare` and checkpoints. `step` has the hooks of a training step, and
`distributed.torch_collectives` the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate_core.backend.pending import PendingGradientHooks
from accelerate_core.backend.step import StepHooks
from accelerate_core.config.parallelism import JOINT
from accelerate_core.contract.capabilities import NEEDS
from accelerate_core.contract.hooks import API_VERSION, owner, wrong_answer
from accelerate_core.contract.members import Scope
from accelerate_core.contract.topology import Process, Topology
from accelerate_core.data.device_feed import feed
from accelerate_core.distributed import process as runtime
from accelerate_core.distributed.torch_collectives import TorchCollectives, host_group
from accelerate_core.errors import ConfigurationError, listing
from accelerate_core.plugins.selection import Claim, Request

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate_core.contract.members import PlanEntryView, PreparePlanView, Scheduler
    from accelerate_core.contract.view import AcceleratorView, RuntimeView, SetupView


#: Scope of a collective -> the mesh dimensions, by their joint name, whose ranks take part: those
#: with different samples, and those with different terms of a loss.
_SCOPES: dict[Scope, str] = {"data": "dp", "loss": "dp_cp"}


class Backend(StepHooks, PendingGradientHooks, TorchCollectives):
    """Base class of every backend.

    Its class attributes declare what the core, error messages and the documentation need to know:

    * `supports`: what users may request with this backend; see below.
    * `owns`: what the core leaves to this backend: `precision` (autocast in forward, and loss scaling),
      `device_placement`, `accumulation` (dividing the loss), `optimizer` (its optimizer doesn't hold
      the model's parameters but other tensors), `checkpoint` (the files of models and optimizers,
      written by the hook `save_state`).
    * `reduces_gradients`: when the gradients of all ranks have been combined. One of `backward`, `step`,
      `engine` and `never` (see `contract.capabilities.REDUCES_GRADIENTS`). It has no default; a backend
      that doesn't declare it is refused.
    * `compile_at`: whether the compile stage runs `before` or `after` `prepare_model`, or whether the
      backend compiles on its `own`.

    The conformance suite tests what `supports` declares and skips the rest. Its keys:

    * `accepts`: what precisions may need, as words of `contract.capabilities.NEEDS`. Default:
      autocast, loss_scaling, modules.
    * `precisions`: names of precisions that the backend implements itself, regardless of their `needs`.
    * `mesh`: the names of the mesh dimensions that it supports.
    * `devices`: device types by torch's names, or None for all. On any other device, starting fails.
    * `no_sync`, `join`, `compile`, `several_models`: whether it supports these.
    * `num_items`: for a backend that owns accumulation, whether it can divide by a number of items.
    * `gradients`: whether a checkpoint can contain the gradients of an unfinished accumulation
      cycle. True is the default; with "same_layout", only a run with the same number of ranks and
      the same mesh can load them; with False, saving in the middle of a cycle is an error.
    * `exact`: whether a step equals the step of one process on the samples of all ranks. Default: True.
    * `own_mesh`: whether the backend itself compares the sizes of a mesh with its devices.
    * `elastic`: whether `data_shard` and `loss_shard` may change, and may count processes that are
      not in this world. After a change, the backend calls `accelerator.reshare()`.

    A backend is constructed with `settings`, an instance of the plugin's `Settings` (None if it has no
    such class), and `handlers`, the kwargs handlers that the script passed for it.
    """

    name: ClassVar[str]
    #: Version of the contract that it was written for. Every plugin declares this itself.
    api_version: ClassVar[tuple[int, int]]
    reduces_gradients: ClassVar[Literal["backward", "step", "engine", "never"]]
    supports: ClassVar[Mapping[str, Any]] = {}
    owns: ClassVar[frozenset[str]] = frozenset()
    compile_at: ClassVar[Literal["before", "after", "own"]] = "before"
    #: For `estimate-memory`: mode -> which of `weights`, `gradients` and `optimizer` are divided over
    #: the ranks. The mode "" is the only or the usual one.
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Whether to start a process group even for one process.
    needs_group: ClassVar[bool] = False
    #: Settings class, declared with `settings`.
    Settings: ClassVar[type[object] | None] = None
    #: Further settings classes, whose fields are options of `launch` and keys of config files.
    more_settings: ClassVar[tuple[type[object], ...]] = ()
    #: Whether users may also pass a mapping of names to `Settings`; `settings` is then a dict.
    several_settings: ClassVar[bool] = False
    #: Classes of `kwargs_handlers` that this backend takes in addition to `Settings`.
    handlers: ClassVar[tuple[type, ...]] = ()

    _mesh: DeviceMesh | None = None
    _scopes: Mapping[Scope, dist.ProcessGroup] = {}
    _joint_meshes: Mapping[str, DeviceMesh] = {}

    def __init__(self, settings: Any = None, handlers: Sequence[object] = ()) -> None:
        self.settings = settings
        self.given_handlers = tuple(handlers)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Return a claim on this run, or None; called only if one of the plugin's triggers matched."""
        return None

    def core_defaults(self) -> Mapping[str, object]:
        """Return core settings that follow from the backend's settings, such as accumulation steps.

        They may include a `parallelism_config`, whose `dp_shard_size` then follows from the number of ranks.
        """
        return {}

    def check(self, setup: SetupView) -> None:
        """Raise an error for a combination of settings that this backend cannot run.

        Called before any process or device is started.

        * `setup`: the requested settings and the selected plugins.
        """

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return the member of `DistributedType` that scripts see as `distributed_type`."""
        return "NO"

    # --- start --------------------------------------------------------------------------------

    @owner
    def init_process_group(self, setup: SetupView, start: Process) -> None:
        """Start the default process group.

        * `setup`: the requested settings and the selected plugins.
        * `start`: ranks, device, store and timeout.

        Default: start torch.distributed's default group.
        """
        runtime.start_group(start)

    @owner
    def device(self, setup: SetupView, topology: Topology, cpu: bool) -> torch.device:
        """Choose this process's device and make it the current one; called before the group starts.

        * `setup`: the requested settings and the selected plugins.
        * `cpu`: whether the user asked to train on the CPU.

        Default: use the accelerator with this local rank, or the CPU.
        """
        return runtime.default_device(topology, cpu)

    @owner
    def device_count(self, accelerator: AcceleratorView) -> int:
        """Return the number of devices that all processes compute on together.

        Default: one per process.
        """
        return int(accelerator.num_processes)

    @owner
    def mesh(self, runtime: RuntimeView) -> DeviceMesh | None:
        """Return the device mesh, or None; called once the process group runs.

        * `runtime`: the setup, the ranks and the device.

        Default: create the mesh of `parallelism_config` on the first call.
        """
        config = runtime.parallelism_config
        if config is None or not dist.is_initialized():
            return None
        if self._mesh is None:
            self._mesh = config.build_device_mesh(runtime.device.type)
            self._joint_meshes = config.flatten(self._mesh)
            world = self._mesh.size()
            parts = {scope: self._joint_meshes[name] for scope, name in _SCOPES.items()}
            self._scopes = {
                scope: part.get_group() for scope, part in parts.items() if part.size() < world
            }
        return self._mesh

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the process group of a scope; None means the default group."""
        return self._scopes.get(scope)

    def sub_mesh(self, name: str) -> DeviceMesh:
        """Return the part of the mesh with a given name.

        Args:
            name: the name of one dimension, or the joint name of several.

        Raises:
            ConfigurationError: the mesh has no part of that name, or there is no mesh.
        """
        if name in self._joint_meshes:
            return self._joint_meshes[name]
        dimensions = None if self._mesh is None else self._mesh.mesh_dim_names
        known = [*(dimensions or ()), *self._joint_meshes]
        if name not in known or self._mesh is None:
            have = f"its parts are {listing(known)}" if known else "there is no mesh"
            raise ConfigurationError(f"The device mesh has no part {name!r}; {have}.")
        return self._mesh[name]

    @owner
    def new_group(
        self, accelerator: AcceleratorView, ranks: Sequence[int] | None, device_type: str | None
    ) -> dist.ProcessGroup | None:
        """Return a new process group, or None if the backend doesn't use torch's process groups.

        Only the members of the group call this. Without a group, the core doesn't communicate in
        background threads.

        * `ranks`: the members; None means all.
        * `device_type`: "cpu" for tensors in host memory, None for tensors on the backend's devices.

        Default: create a torch.distributed group, or return None on one process.
        """
        if accelerator.num_processes == 1:
            return None
        timeout = accelerator.group_timeout
        if device_type == "cpu":
            return host_group(ranks, timeout)
        members = None if ranks is None else list(ranks)
        group: dist.ProcessGroup = dist.new_group(
            members, timeout=timeout, use_local_synchronization=members is not None
        )
        return group

    @owner
    def data_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        """Return (index, count): which part of the data this rank reads.

        * `runtime`: the setup, the ranks and the device.

        Default: every rank reads its own part. On a mesh, the ranks of one tp, cp or sp group read the
        same part.
        """
        config = runtime.parallelism_config
        if config is None:
            return runtime.process_index, runtime.num_processes
        return config.shard(runtime.process_index, JOINT["dp"])

    @owner
    def loss_shard(self, runtime: RuntimeView) -> tuple[int, int]:
        """Return (index, count) of this rank among the ranks over which a loss is summed.

        These are the ranks that hold different samples, or different parts of one sample.

        * `runtime`: the setup, the ranks and the device.

        Default: the same as `data_shard`. On a mesh, the ranks of a cp or sp group count as well.
        """
        config = runtime.parallelism_config
        if config is None:
            return runtime.hooks.data_shard()
        return config.shard(runtime.process_index, JOINT["dp_cp"])

    @owner
    def fixed_batch(self, accelerator: AcceleratorView) -> int | None:
        """Return a number; the size of each rank's batches will be a multiple of it.

        Use this if the backend compiles for fixed shapes. If the size of a batch isn't a multiple, or is
        smaller than the loader's batch size, the core pads the batch by repeating some of its samples.
        `gather_for_metrics` drops the repeated ones. On several ranks, the batch size must already be a
        multiple.

        Default: None, which leaves batches unchanged.
        """
        return None

    @owner
    def init_model_context(self, accelerator: AcceleratorView) -> AbstractContextManager[object]:
        """Return the context in which scripts construct models.

        Default: a context that does nothing.
        """
        return nullcontext()

    # --- prepare ------------------------------------------------------------------------------

    @owner
    def make_model(self, accelerator: AcceleratorView, obj: object) -> torch.nn.Module:
        """Return a module for an object that was classified as a model, such as a model provider.

        Called before parameters are recorded, so the parameters of the returned module are trained.

        Default: return the object itself.
        """
        return cast(torch.nn.Module, obj)

    @owner
    def prepare(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Prepare all objects of one `prepare` call, by replacing the values in the plan.

        Override this if models and optimizers can only be prepared together.

        Default: prepare models, then optimizers, then schedulers, one at a time, with the hooks below.
        """
        hooks = accelerator.hooks

        def prepare_model(model: torch.nn.Module, entry: PlanEntryView) -> torch.nn.Module:
            prepared = hooks.prepare_model(model, entry.evaluation_mode)
            if prepared is None:
                raise wrong_answer("prepare_model", self.name, prepared, "the model to use")
            return prepared

        plan.each("model", prepare_model)
        plan.rebind()
        plan.each("optimizer", lambda optimizer, _: hooks.prepare_optimizer(optimizer))
        plan.each("scheduler", lambda scheduler, _: hooks.prepare_scheduler(scheduler))

    @owner
    def prepare_model(
        self, accelerator: AcceleratorView, model: torch.nn.Module, evaluation_mode: bool
    ) -> torch.nn.Module:
        """Return the model to use; called after all stages, when the model is on the device.

        * `evaluation_mode`: whether the model is only evaluated, so that no optimizer holds its parameters.

        Default: return the model unchanged.
        """
        return model

    @owner
    def prepare_optimizer(self, accelerator: AcceleratorView, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step. It already holds the prepared model's parameters.

        Default: return the optimizer unchanged.
        """
        return optimizer

    @owner
    def prepare_scheduler(self, accelerator: AcceleratorView, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler to step.

        Default: return the scheduler unchanged.
        """
        return scheduler

    @owner
    def feed_device(
        self, accelerator: AcceleratorView, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Yield the batches, moved to the device.

        * `non_blocking`: whether to copy from pinned memory without waiting.

        Default: move each batch to the device; one batch ahead if the device has streams.
        """
        return feed(batches, accelerator.device, non_blocking)

    @owner
    def unwrap_model(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Remove the wrapper that `prepare_model` added; changes by stages remain.

        Default: return the model unchanged.
        """
        return model

    @owner
    def join_uneven_inputs(
        self, accelerator: AcceleratorView, joinables: Sequence[object]
    ) -> AbstractContextManager[object]:
        """Return a context in which ranks may run out of batches at different steps.

        * `joinables`: the prepared objects that take part.

        Default: a context that does nothing.
        """
        return nullcontext()

    # --- state --------------------------------------------------------------------------------

    @owner
    def model_state(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict that checkpoints contain, with the keys of the user's own model.

        Default: return the unwrapped model's state dict.
        """
        return dict(accelerator.unwrap_model(model).state_dict())

    @owner
    def load_model_state(
        self,
        accelerator: AcceleratorView,
        model: torch.nn.Module,
        state: Mapping[str, Any],
        strict: bool,
    ) -> None:
        """Load a state dict that `model_state` returned.

        * `strict`: whether missing and unexpected keys are an error.

        Default: load it into the unwrapped model.
        """
        accelerator.unwrap_model(model).load_state_dict(state, strict=strict)

    @owner
    def optimizer_state(self, accelerator: AcceleratorView, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer that `prepare_optimizer` returned.

        Default: return `optimizer.state_dict()`.
        """
        return dict(optimizer.state_dict())

    @owner
    def load_optimizer_state(
        self, accelerator: AcceleratorView, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state dict that `optimizer_state` returned.

        Default: call `optimizer.load_state_dict`.
        """
        optimizer.load_state_dict(dict(state))

    @owner
    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the state of this rank's random generators that aren't torch's, for a checkpoint.

        Default: return nothing.
        """
        return {}

    @owner
    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Restore the generators from `rng_state`, after everything else in the checkpoint is loaded.

        Default: do nothing.
        """

    @owner
    def on_seed(self, accelerator: AcceleratorView, seed: int) -> None:
        """Seed the generators of `rng_state`; called by `set_seed`.

        * `seed`: this rank's seed.

        Default: do nothing.
        """

    @owner
    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], Mapping[str, Any] | None] | None:
        """Write the backend's own files of a checkpoint; called on every rank.

        Return None after writing, or a function that writes. If `later` is True, training continues during
        the save: copy the state now and return a function that writes it, without using the default group.
        The function may return the checksums of this rank's files (name in `directory` -> `FileEntry` of
        accelerate-checkpoint); otherwise rank 0 reads the files to compute them. To also write models and
        optimizers here instead of in the core, declare `owns={"checkpoint"}`.

        * `directory`: for the backend's files only, inside the checkpoint; it doesn't exist yet.
        * `options`: additional arguments of `Accelerator.save_state`.

        Default: write nothing.
        """
        if options:
            accelerator.warn_once(
                f"The backend {self.name!r} ignores {listing(options)} of save_state."
            )
        return None

    @owner
    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read the files that `save_state` wrote.

        * `directory`: exists only if files were written.
        * `options`: additional arguments of `Accelerator.load_state`.

        Default: read nothing.
        """

    @owner
    def consolidate(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the full, unsharded state dict. Ranks other than rank 0 may return an empty dict.

        Default: return the unwrapped model's state dict.
        """
        return dict(accelerator.unwrap_model(model).state_dict())


class SingleProcess(Backend):
    """One process on one device, with the defaults of `Backend`."""

    name = "single"
    api_version = API_VERSION
    reduces_gradients = "never"
    supports = {"accepts": tuple(NEEDS)}
