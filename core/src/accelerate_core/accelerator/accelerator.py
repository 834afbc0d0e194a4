"""The `Accelerator` class: the public facade, which delegates to its parts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, Unpack, cast, overload

import torch

from accelerate_core import failures
from accelerate_core.accelerator.assignment import Assignable
from accelerate_core.accelerator.checkpoint_verbs import CheckpointVerbs
from accelerate_core.accelerator.collective_verbs import CollectiveVerbs
from accelerate_core.accelerator.construction import check, resolve, start_process
from accelerate_core.accelerator.preparing_verbs import PreparedVerbs
from accelerate_core.accelerator.scoped_collectives import make_collectives, make_metrics
from accelerate_core.accelerator.signature import MeshVerbs, ShowsPluginArguments
from accelerate_core.accelerator.started import SetupAndRanks, StartedRuntime
from accelerate_core.accelerator.tracking_verbs import TrackingVerbs
from accelerate_core.accelerator.training_verbs import TrainingVerbs
from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.builtin.memory import clear_device_cache
from accelerate_core.config.enums import DistributedType
from accelerate_core.config.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.shown import Shown
from accelerate_core.contract.checkpointer import RunParts
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.parts import LoaderFactory
from accelerate_core.distributed import process as runtimes
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import check_consistent
from accelerate_core.errors import WarnOnce, call_all
from accelerate_core.plugins.devices import check_precision
from accelerate_core.plugins.discovery import exported, why_without
from accelerate_core.plugins.factory import attribution
from accelerate_core.plugins.manager import BoundHooks, SharedHooks, bind
from accelerate_core.prepare import run
from accelerate_core.prepare.prepared import Prepared, PreparedObjects
from accelerate_core.state import AcceleratorState, ProcessVerbs, absent_attribute
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loop import TrainingLoop
from accelerate_core.training.loss_scaler import LossScaler

if TYPE_CHECKING:
    from accelerate_core.plugins.contributed import PluginArguments, PluginAttributes
else:  # what plugins add follows from what is installed
    PluginArguments, PluginAttributes = dict[str, Any], object

#: Whether each object that is passed to `prepare` is moved to the device.
Placement = Sequence[bool | None] | None

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Accelerator(
    SetupAndRanks,
    ProcessVerbs,
    MeshVerbs,
    PreparedVerbs,
    TrainingVerbs,
    CollectiveVerbs,
    CheckpointVerbs,
    TrackingVerbs,
    Assignable,
    Shown,
    PluginAttributes,
    metaclass=ShowsPluginArguments,
):
    """Runs a plain PyTorch training loop on the setup that the process was started with.

    Args:
        device_placement: move models and batches to the device.
        split_batches: deprecated; use `DataLoaderConfiguration.split_batches`.
        mixed_precision: `no`, `fp16`, `bf16`, `downcast_bf16`, or a precision that a plugin adds.
        gradient_accumulation_steps: micro-batches per optimizer step; see `accumulate`.
        cpu: run on the CPU even if accelerators are present, and even with several processes.
        dataloader_config: how data is split across the ranks.
        rng_types: random generators to synchronise at the start of each iteration over a loader.
        log_with: names, classes or instances of trackers, or `"all"`.
        project_dir: root directory of logs and checkpoints.
        project_config: directories, and the naming and retention of checkpoints.
        gradient_accumulation_plugin: detailed settings for gradient accumulation.
        step_scheduler_with_optimizer: whether prepared schedulers step with the optimizer. Pass False if
            the script steps them at other times.
        kwargs_handlers: settings objects of the core and of plugins.
        dynamo_backend: compiler for `torch.compile`.
        dynamo_plugin: detailed settings for `torch.compile`.
        backend: name of a backend plugin, or a `Backend` class or instance; default: detected.
        process_group_timeout: time limit of a collective, in seconds.
        upcast_outputs: convert half-precision outputs of models to fp32 (default: True).
        parallelism_config: sizes of the dimensions of the device mesh, for backends with a mesh.
        scheduler_steps: how far a prepared scheduler advances when the optimizer steps: `"per_process"`
            means one step for each process that reads different data, and `"per_step"` means one step.
            The backend sets the default, as in Hugging Face Accelerate.
        scheduler_metric: which metric `scheduler.step(metric)` passes to a prepared scheduler, such as
            `ReduceLROnPlateau`: the `"mean"` over the processes (the default), that of `"rank_0"`, or the
            `"local"` one of each process, with which their learning rates may differ.
        preemption_signals: signals, such as "SIGTERM,SIGUSR1". When one arrives, all ranks save at the
            next step boundary and exit with status 75. Requires automatic checkpoint naming.
        checkpointer: name of the plugin that saves and loads; default: `directory`.
        tracking: name of the plugin that passes values to the trackers; default: `queued`.
        loaders: name of the plugin that creates prepared data loaders; default: the core.
        plugin_arguments: arguments of installed plugins.

    Raises:
        UnknownArgumentError: neither the core nor an installed plugin has this argument.
        ConfigurationError: a value is invalid. The message has its source and the allowed values.
        MissingPluginError: a requested plugin is not installed. The message has the pip command.

    Example:
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_function(model(x), y))
            optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        backend: str | type[Backend] | Backend | None = None,
        process_group_timeout: float | None = None,
        upcast_outputs: bool | None = None,
        scheduler_steps: Literal["per_process", "per_step"] | None = None,
        scheduler_metric: Literal["mean", "rank_0", "local"] | None = None,
        preemption_signals: str | None = None,
        checkpointer: str | None = None,
        tracking: str | None = None,
        loaders: str | None = None,
        parallelism_config: ParallelismConfig | None = None,
        **plugin_arguments: Unpack[PluginArguments],
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["plugin_arguments"]
        topology = runtimes.running() or runtimes.launched_topology()
        self._setup = resolve(arguments, plugin_arguments, topology)
        #: The active precision. An attribute, like the device, because autocast reads both in every step.
        self.precision: Precision = self._setup.precision
        self._options = dataclasses.replace(self._setup.options)  # scripts may change them
        saving, loader_factory = check(self._setup)
        self._saving = saving
        self._closed = False
        handlers = self._setup.handlers
        self.init_handler: InitProcessGroupKwargs | None = handlers.get(InitProcessGroupKwargs)
        self.scaler_handler: GradScalerKwargs | None = handlers.get(GradScalerKwargs)
        self._runtime = start_process(self, self._setup)
        self.device = self._runtime.device
        try:
            self._build(loader_factory, log_with)
            self._shared_hooks.call_each("on_start")
            self._shared_hooks.warn_of_hidden_attributes(dir(self), self.warn_once)
        except BaseException:
            runtimes.release(self)
            raise

    def _build(self, loader_factory: LoaderFactory | None, log_with: Any) -> None:
        """Create the parts in order of their dependencies."""
        setup = self._setup
        process = self._runtime
        options = self._options
        self._warn_once = WarnOnce(main=process.process_index == 0)
        check_precision(process.device.type, setup.mixed_precision)
        started = StartedRuntime(setup, process, self._warn_once)
        setup.precision.check(started)
        check_consistent(process, setup.facts())
        started.hooks.mesh()  # all ranks create its process groups now, in the same order
        self.scaler = setup.make_scaler(started)
        self.hooks = BoundHooks(setup.owner_methods, self)
        self._shared_hooks: SharedHooks = SharedHooks(setup.plugins, self)
        self.gradient_state = GradientState(**setup.accumulation.to_dict())
        self._collectives = make_collectives(started, self.hooks, options, self.gradient_state)
        objects = PreparedObjects()
        loss_scaler = None
        if self.scaler is not None:
            unscale = self.hooks.unscale_gradients
            loss_scaler = LossScaler(self.scaler, objects.optimizers, unscale)
        self._prepared = Prepared(
            hooks=self.hooks,
            shared_hooks=self._shared_hooks,
            backend=setup.backend,
            precision=setup.precision,
            prepare_precision=bind(setup.precision.prepare, self),
            objects=objects,
            options=options,
            process=process,
            world=self._collectives.world,
            data=self._collectives.data,
            metrics=make_metrics(started, self._collectives),
            gradient_state=self.gradient_state,
            loss_scaler=loss_scaler,
            make_loader=None if loader_factory is None else bind(loader_factory.make_loader, self),
            loader_plugin=setup.parts["loaders"],
            warn_once=self._warn_once,
        )
        # With an elastic backend, a world of one process may share gradients with other worlds.
        shares_gradients = self.use_distributed or setup.backend.supports.get("elastic", False)
        self._training = TrainingLoop(
            hooks=self.hooks,
            shared_hooks=self._shared_hooks,
            backend=setup.backend,
            state=self.gradient_state,
            comm=self._collectives.loss,
            distributed=shares_gradients,
            defers_sync=shares_gradients and self.hooks.is_overridden("no_sync"),
            models=objects.models,
            optimizers=objects.optimizers,
            trainable=objects.trainable,
            scaler=loss_scaler,
            replaced=self._prepared.replaced_parameters,
        )
        self._tracking = setup.make_tracking(log_with, process)
        self._saving.attach(bind(Accelerator.run_parts, self))
        DistributedType.register(self.distributed_type)
        if setup.unasked:
            self.warn_once(setup.unasked)

    # --- the setup ----------------------------------------------------------------------------

    @property
    def mixes_precision(self) -> bool:
        """Whether forward runs under autocast."""
        return self.precision.mixes

    native_amp = mixes_precision

    @property
    def communicator(self) -> Communicator:
        """Collectives among all ranks, on flat tensors and objects."""
        return self._collectives.world

    @property
    def multi_device(self) -> bool:
        """Whether more than one device is in use."""
        return self.use_distributed

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of setup that runs, as declared by the active backend."""
        with attribution("distributed_type", self._setup.backend_record):
            return DistributedType(self.backend.distributed_type(self))

    @property
    def state(self) -> AcceleratorState:
        """The state object that Hugging Face Accelerate scripts read."""
        return AcceleratorState(self)

    @property
    def device_count(self) -> int:
        """The number of devices over all processes: one per process, unless the backend uses more."""
        count = self.hooks.device_count()
        if not isinstance(count, int) or count < 1:
            raise wrong_answer("device_count", self.backend.name, count, "a whole number above 0")
        return count

    # --- preparing ----------------------------------------------------------------------------

    @overload
    def prepare(self, one: T, /, *, device_placement: Placement = None) -> T: ...
    @overload
    def prepare(self, *args: *Ts, device_placement: Placement = None) -> tuple[*Ts]: ...
    # mypy does not recognise that the implementation accepts the arguments of both overloads.
    def prepare(self, *args: Any, device_placement: Placement = None) -> Any:  # type: ignore[misc]
        """Prepare models, optimizers, schedulers and loaders, and return them in the same order.

        Args:
            args: the objects to prepare. Objects of other types are returned unchanged.
            device_placement: whether to move each object to the device.

        Raises:
            PrepareError: a returned model would not train as requested.

        Example:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        """
        result = run.prepare(self._prepared, args, device_placement)
        never = self.backend.reduces_gradients == "never" and self.num_processes > 1
        if self.optimizers and never:
            self.warn_once(
                f"Each rank trains its own model: backend {self.backend.name!r} never reduces gradients."
            )
        if self.optimizers and not self._saving.possible:
            self.warn_once(f"This run cannot be saved: {why_without('checkpointer')}")
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model. With `evaluation_mode`, only apply precision and compilation."""
        made = run.prepare(self._prepared, [model], [device_placement], evaluation_mode)
        return cast(torch.nn.Module, made[0])

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare the optimizer of models that are already prepared."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare the scheduler of optimizers that are already prepared."""
        return self.prepare(scheduler)

    # --- the step -----------------------------------------------------------------------------

    @property
    def profile_handler(self) -> Any:
        """The `ProfileKwargs` in `kwargs_handlers`, or None."""
        return self._setup.handlers.get(exported("ProfileKwargs"))

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context that profiles with `torch.profiler` and yields its profiler.

        Args:
            profile_handler: a `ProfileKwargs`; default: the one in `kwargs_handlers`.

        Raises:
            MissingPluginError: accelerate-tracking, which writes the traces, is not installed.

        Example:
            with accelerator.profile() as profiler:
                accelerator.backward(loss_function(model(x), y))
            accelerator.print(profiler.key_averages().table(row_limit=5))
        """
        profile = exported("profile")  # first, so that an error names this method
        handler = profile_handler or self.profile_handler
        context: AbstractContextManager[Any] = profile(handler, self.process_index)
        return context

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes models: rank 0, or one rank per machine with `save_on_each_node`."""
        per_machine = self.project_configuration.save_on_each_node
        return self.is_local_main_process if per_machine else self.is_main_process

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Accelerator:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.end_training()
            return
        failed = failures.is_failure(error)
        if self._closed:
            self._tracking.finish(failed)
            return
        self._closed = True
        # The other ranks may be waiting for this one, so nothing here waits for them.
        call_all(
            lambda: self._saving.close(failed=True),
            lambda: self._shared_hooks.call_each("on_error", error=error),
            lambda: self._tracking.finish(failed),
        )

    def end_training(self) -> None:
        """Finish trackers and plugins. The last Accelerator also ends the process group.

        If called while an exception is handled or propagates (in `except` or `finally`), it marks the
        trackers' runs as failed. If one part raises an error, the others are still ended.
        """
        failed = self._tracking.is_failing()
        if self._closed:
            self._tracking.finish(failed)  # for a run that started after the first call
            return
        self._closed = True
        call_all(
            lambda: self._saving.close(failed=False),
            lambda: self._tracking.finish(failed),
            lambda: self._shared_hooks.call_each("on_end"),
            lambda: runtimes.release(self),
        )

    def reshare(self) -> None:
        """Divide the rest of the data over the ranks of a new `data_shard`; for elastic backends."""
        self._collectives.resize()
        self._prepared.reshare()
        self._shared_hooks.call_each("on_membership_change")

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects, reset `step`, and return None for each object passed."""
        self._saving.release()
        self._shared_hooks.call_each("on_free")
        self._prepared.forget()
        self._training.update_scale()
        self.gradient_state.forget()
        self.step = 0
        objects = (None,) * len(objects)
        clear_device_cache(garbage_collection=True)
        return list(objects)

    clear = free_memory

    def explain(self) -> str:
        """Return every setting with its source, one per line, and the explanations of plugins."""
        lines = [f"{name} = {value}  ({origin})" for name, value, origin in self._setup.rows()]
        return "\n".join([*lines, *self._shared_hooks.call_each("explain")])

    def _rows(self) -> list[tuple[str, str, str]]:
        first = ("rank", f"{self.process_index} of {self.num_processes}", self._runtime.source)
        return [first, ("device", str(self.device), ""), *self._setup.rows()]

    def __repr__(self) -> str:
        names = ("mixed_precision", "num_processes", "process_index", "device")
        said = "".join(f", {name}={getattr(self, name, None)!s}" for name in names)
        return f"Accelerator(backend={getattr(getattr(self, 'backend', None), 'name', None)}{said})"

    def warn_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn once per text, on the main process, or on every process with `every_rank`."""
        self._warn_once(text, every_rank=every_rank)

    def run_parts(self) -> RunParts:
        """Return the parts of the run that a checkpointer saves and restores, for plugins."""
        saving = self._saving
        objects = self._prepared.objects
        options = self._options
        return RunParts(
            # A save in the background may outlast the script's last reference to the Accelerator.
            hooks=self.hooks.holding(),
            backend=self.backend,
            precision=self.precision,
            process=self._runtime,
            communicator=self.communicator,
            models=objects.models,
            optimizers=objects.optimizers,
            schedulers=objects.schedulers,
            loaders=objects.loaders,
            scaler=self.scaler,
            gradient_state=self.gradient_state,
            cycle=self._training,
            project=lambda: saving.project,
            registered=saving.registered,
            save_hooks=saving.save_hooks,
            load_hooks=saving.load_hooks,
            restore_positions=lambda: options.dataloader_config.restore_positions is not False,
            inner_model=self._prepared.inner_model,
            whole_state=self._prepared.get_state_dict,
            plugins=[record.identity for record, _, _ in self._setup.plugins.plugins],
            shared_hooks=self._shared_hooks,
            tracking=self._tracking,
            warn_once=self._warn_once,
            end_training=self.end_training,
        )

    if not TYPE_CHECKING:  # type checkers would accept every misspelt name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or "_shared_hooks" not in self.__dict__:
                raise AttributeError(f"{name!r} is not available before on_start")
            if hasattr(type(self), name):
                # A property raised an AttributeError. Raise it again, so that its cause is visible.
                return object.__getattribute__(self, name)
            return self._plugin_attribute(name, "Accelerator")

    def _plugin_attribute(self, name: str, owner: str) -> Any:
        """Return an attribute that an active plugin provides, or the value that reports its absence."""
        provided = self._shared_hooks.provided_attributes()
        if name in provided:
            return provided[name]
        return absent_attribute(name, owner, [*dir(self), *provided])
