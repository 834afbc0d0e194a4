"""`Backend`: the owner hooks with defaults for one process and for torch.distributed.

A backend is a subclass that overrides what differs. Every default is right for
one process and for the default group, which is why a small backend is small. Here are its
declarations and the hooks of start, of `prepare` and of what a checkpoint keeps; `step` has those of
a step, and `distributed.torch_collectives` those that communicate.
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
    from accelerate_core.contract.view import AcceleratorView, SetupView


#: Scope of a collective -> the mesh dimensions, by their joint name, whose ranks take part: those
#: with different samples, and those with different terms of a loss.
_SCOPES: dict[Scope, str] = {"data": "dp", "loss": "dp_cp"}


class Backend(StepHooks, PendingGradientHooks, TorchCollectives):
    """Base of every backend.

    Class attributes are declarations the core, its error texts and the docs read:

    * `supports`: `accepts` (what precisions may need, words of `contract.capabilities.NEEDS`; without
      it autocast, loss_scaling and modules), `precisions` (names it brings about by itself,
      whatever they need), `mesh` (dimension names),
      `devices` (types such as "cuda", or None for all: on another one the core does not start
      it), `no_sync`, `join`, `compile`, `num_items` (of one that owns accumulation: whether it
      can divide by a number of items), `gradients` (what `pending_gradients` can give in the
      middle of an accumulation cycle: True, the default; "same_layout", if only a run on
      as many ranks and the same mesh can load it; False, and such a save is refused),
      `several_models`, `exact` (True unless False: a step is that of one process on the samples
      of all ranks). The conformance suite checks what is declared and skips the rest by name.
    * `owns`: what the core leaves to this backend: `precision` (autocast of forward, scaling),
      `device_placement`, `accumulation` (dividing the loss), `optimizer` (which holds other
      tensors than the model's parameters), `checkpoint` (model and optimizer files, written in
      the hook `save_state`).
    * `reduces_gradients`: when ranks have the gradients of all of them, a word of
      `contract.capabilities.REDUCES_GRADIENTS`: `backward`, `step`, `engine` or `never`. Without
      a default: a backend that does not say is refused by name.
    * `compile_at`: whether the compile stage runs `before` or `after` `prepare_model`,
      or is the backend's `own`.

    It is made with `settings`, an instance of the plugin's `Settings` (None without such a class), and
    `handlers`, the kwargs handlers that were given for it.
    """

    name: ClassVar[str]
    #: Of the contract it was written for; every plugin says its own.
    api_version: ClassVar[tuple[int, int]]
    reduces_gradients: ClassVar[Literal["backward", "step", "engine", "never"]]
    supports: ClassVar[Mapping[str, Any]] = {}
    owns: ClassVar[frozenset[str]] = frozenset()
    compile_at: ClassVar[Literal["before", "after", "own"]] = "before"
    #: For `estimate-memory`: mode -> which of `weights`, `gradients`, `optimizer` it divides over
    #: the ranks. The mode "" is the only one, or the usual one.
    shards: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Start a process group even for one process.
    needs_group: ClassVar[bool] = False
    #: Settings class, made with `settings`.
    Settings: ClassVar[type[object] | None] = None
    #: Further settings classes, whose fields are options of `launch` and keys of config files.
    more_settings: ClassVar[tuple[type[object], ...]] = ()
    #: Take a mapping of names to `Settings`, too; `settings` is then a dict.
    several_settings: ClassVar[bool] = False
    #: Classes of `kwargs_handlers` this backend takes, besides `Settings`.
    handlers: ClassVar[tuple[type, ...]] = ()

    _mesh: DeviceMesh | None = None
    _scopes: Mapping[Scope, dist.ProcessGroup] = {}
    _joint_meshes: Mapping[str, DeviceMesh] = {}

    def __init__(self, settings: Any = None, handlers: Sequence[object] = ()) -> None:
        self.settings = settings
        self.given_handlers = tuple(handlers)

    @classmethod
    def detect(cls, request: Request) -> Claim | None:
        """Claim this run or not; called only when one of the plugin's triggers fired."""
        return None

    def core_defaults(self) -> Mapping[str, object]:
        """Return core settings that follow from this backend's own, such as accumulation steps.

        `parallelism_config` may be among them, with `dp_shard_size` left to the number of ranks.
        """
        return {}

    def check(self, setup: SetupView) -> None:
        """Refuse a combination that this backend cannot run, before anything is started.

        `setup`: what was asked for and chosen; there are no ranks and no device yet.
        """

    def distributed_type(self, accelerator: AcceleratorView) -> str:
        """Return the member of `DistributedType` that user code compares with."""
        return "NO"

    # --- start --------------------------------------------------------------------------------

    @owner
    def init_process_group(self, setup: SetupView, start: Process) -> None:
        """Start the default process group; `start` has ranks, device, store and timeout.

        `setup`: what was asked for and chosen.

        Default: start torch.distributed's default group.
        """
        runtime.start_group(start)

    @owner
    def device(self, setup: SetupView, topology: Topology, cpu: bool) -> torch.device:
        """Choose and select the device of this process; called before the group starts.

        `setup`: what was asked for and chosen.

        Default: take the local device of this rank, or the CPU.
        """
        return runtime.default_device(topology, cpu)

    @owner
    def device_count(self, accelerator: AcceleratorView) -> int:
        """Return how many devices this world computes on.

        Default: one per process.
        """
        return int(accelerator.num_processes)

    @owner
    def mesh(self, accelerator: AcceleratorView) -> DeviceMesh | None:
        """Return the device mesh, once the group runs; None where there is none.

        Default: make the mesh of `parallelism_config` once; None where there is none.
        """
        config = accelerator.parallelism_config
        if config is None or not dist.is_initialized():
            return None
        if self._mesh is None:
            self._mesh = config.build_device_mesh(accelerator.device.type)
            self._joint_meshes = config.flatten(self._mesh)
            world = self._mesh.size()
            parts = {scope: self._joint_meshes[name] for scope, name in _SCOPES.items()}
            self._scopes = {
                scope: part.get_group() for scope, part in parts.items() if part.size() < world
            }
        return self._mesh

    def scope_group(self, scope: Scope) -> dist.ProcessGroup | None:
        """Return the group that serves a scope, a part of the mesh; None is the default group."""
        return self._scopes.get(scope)

    def sub_mesh(self, name: str) -> DeviceMesh:
        """Return the part of the mesh with a name: a dimension, or several together.

        Args:
            name: of a dimension, or of several that were joined.

        Raises:
            ConfigurationError: the mesh has no part of that name, or there is no mesh.
        """
        if name in self._joint_meshes:
            return self._joint_meshes[name]
        dimensions = None if self._mesh is None else self._mesh.mesh_dim_names
        known = [*(dimensions or ()), *self._joint_meshes]
        if name not in known or self._mesh is None:
            have = f"it has {listing(known)}" if known else "there is none"
            raise ConfigurationError(f"The device mesh has no {name!r}; {have}.")
        return self._mesh[name]

    @owner
    def new_group(
        self, accelerator: AcceleratorView, ranks: Sequence[int] | None, device_type: str | None
    ) -> dist.ProcessGroup | None:
        """Return a new process group; None for `ranks` means all.

        Only its members call this. `device_type` is "cpu" for tensors in host memory, None for
        the backend's own. Who has no torch group returns None: nothing then runs on a thread.

        Default: make a torch.distributed group; None where there is one process.
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
    def data_shard(self, accelerator: AcceleratorView) -> tuple[int, int]:
        """Return (index, count): which part of the data this rank reads.

        Default: give every rank its own part; on a mesh, ranks of one tp, cp or sp group the same.
        """
        config = accelerator.parallelism_config
        if config is None:
            return accelerator.process_index, accelerator.num_processes
        return config.shard(accelerator.process_index, JOINT["dp"])

    @owner
    def loss_shard(self, accelerator: AcceleratorView) -> tuple[int, int]:
        """Return (index, count) among the ranks over which a loss is summed.

        They are those with different samples, and those with different parts of one sample.

        Default: sum losses over the ranks with different samples, or different parts of a sequence.
        """
        config = accelerator.parallelism_config
        if config is None:
            return accelerator.hooks.data_shard()
        return config.shard(accelerator.process_index, JOINT["dp_cp"])

    @owner
    def fixed_batch(self, accelerator: AcceleratorView) -> int | None:
        """Return of how many samples a rank's batches are to be a multiple, to compile for one shape.

        A batch that is not, or is shorter than the others, is filled up with samples of its own,
        also where one rank reads all data, and `gather_for_metrics` leaves out what was added.
        Several ranks need a batch size that is a multiple.

        Default: None, batches are left as they are.
        """
        return None

    @owner
    def init_model_context(self, accelerator: AcceleratorView) -> AbstractContextManager[object]:
        """Return the context in which user code should construct models.

        Default: construct models as torch does.
        """
        return nullcontext()

    # --- prepare ------------------------------------------------------------------------------

    @owner
    def make_model(self, accelerator: AcceleratorView, obj: object) -> torch.nn.Module:
        """Return the module of an object that is classified as a model: of a provider, say.

        Called before parameters are recorded, so its parameters are the ones that are trained.

        Default: it is one.
        """
        return cast(torch.nn.Module, obj)

    @owner
    def prepare(self, accelerator: AcceleratorView, plan: PreparePlanView) -> None:
        """Prepare all objects of one call: replace the entries of the `PreparePlan` in place.

        Default: prepare models, then optimizers, then schedulers, one by one.
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
        """Wrap or change one model after all stages; it is on the device already.

        Default: return the model as it is.

        `evaluation_mode`: the model is not trained: no optimizer will hold its parameters.
        """
        return model

    @owner
    def prepare_optimizer(self, accelerator: AcceleratorView, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to be stepped; its parameters are those of the prepared model.

        Default: return the optimizer as it is.
        """
        return optimizer

    @owner
    def prepare_scheduler(self, accelerator: AcceleratorView, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler to be stepped.

        Default: return the scheduler as it is.
        """
        return scheduler

    @owner
    def feed_device(
        self, accelerator: AcceleratorView, batches: Iterator[Any], non_blocking: bool
    ) -> Iterator[Any]:
        """Yield the batches on the device.

        Default: move the batches to the device, one ahead where it has streams.

        `non_blocking`: copy without waiting, from pinned memory.
        """
        return feed(batches, accelerator.device, non_blocking)

    @owner
    def unwrap_model(self, accelerator: AcceleratorView, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `prepare_model`'s wrapping, not the stages.

        Default: return the model as it is.
        """
        return model

    @owner
    def join_uneven_inputs(
        self, accelerator: AcceleratorView, joinables: Sequence[object]
    ) -> AbstractContextManager[object]:
        """Return a context in which ranks may run out of batches at different steps.

        Default: do nothing.

        `joinables`: the prepared objects that take part.
        """
        return nullcontext()

    # --- state --------------------------------------------------------------------------------

    @owner
    def model_state(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state dict `save_state` keeps; keys as the user's own model has them.

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
        """Load what `model_state` gave.

        Default: load into the unwrapped model.

        `strict`: refuse missing and unexpected names.
        """
        accelerator.unwrap_model(model).load_state_dict(state, strict=strict)

    @owner
    def optimizer_state(self, accelerator: AcceleratorView, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of one inner optimizer.

        Default: return the optimizer's state dict.
        """
        return dict(optimizer.state_dict())

    @owner
    def load_optimizer_state(
        self, accelerator: AcceleratorView, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state` gave.

        Default: load into the optimizer.
        """
        optimizer.load_state_dict(dict(state))

    @owner
    def rng_state(self, accelerator: AcceleratorView) -> Mapping[str, Any]:
        """Return the state of this rank's generators that torch does not know, for a checkpoint.

        Default: there are none.
        """
        return {}

    @owner
    def load_rng_state(self, accelerator: AcceleratorView, state: Mapping[str, Any]) -> None:
        """Set the generators of `rng_state`, after all else of a checkpoint is loaded.

        Default: there are none.
        """

    @owner
    def on_seed(self, accelerator: AcceleratorView, seed: int) -> None:
        """Seed the generators of `rng_state`; `set_seed` was called, with this rank's seed.

        Default: there are none.
        """

    @owner
    def save_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any], later: bool
    ) -> Callable[[], None] | None:
        """Write what the backend keeps beside the core's files; called on every rank, in order.

        `directory` is the backend's own inside the checkpoint and does not exist yet; `options`
        are the further arguments of `save_state`. Write now and return None; or, where `later`
        says that training goes on meanwhile, copy now and return a function that writes, which
        must not use the default group. Declare `owns={"checkpoint"}` to keep models and
        optimizers here alone.

        Default: write nothing: the core keeps models and optimizers.
        """
        if options:
            accelerator.warn_once(
                f"The backend {self.name!r} has no use for {listing(options)} of save_state."
            )
        return None

    @owner
    def load_state(
        self, accelerator: AcceleratorView, directory: Path, options: Mapping[str, Any]
    ) -> None:
        """Read what `save_state` wrote; the directory exists if something was written.

        Default: read nothing.

        `options`: more arguments of `Accelerator.load_state`, for the plugin.
        """

    @owner
    def consolidate(self, accelerator: AcceleratorView, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole, unsharded state dict; ranks other than the main one may get {}.

        Default: return the unwrapped model's state dict: it is whole on every rank.
        """
        return dict(accelerator.unwrap_model(model).state_dict())


class SingleProcess(Backend):
    """One process, one device: the defaults as they are."""

    name = "single"
    api_version = API_VERSION
    reduces_gradients = "never"
    supports = {"accepts": tuple(NEEDS)}
