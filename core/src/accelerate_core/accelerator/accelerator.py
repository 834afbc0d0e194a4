"""The facade: what a script calls, and which part of the Accelerator does it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

import torch

from accelerate_core.accelerator.assignment import Assignable
from accelerate_core.accelerator.checkpoint_verbs import CheckpointVerbs
from accelerate_core.accelerator.collective_verbs import CollectiveVerbs
from accelerate_core.accelerator.collectives import Collectives
from accelerate_core.accelerator.construction import construct, start_process
from accelerate_core.accelerator.preparing_verbs import PreparedVerbs
from accelerate_core.accelerator.saving import Saving, run_parts
from accelerate_core.accelerator.signature import MeshVerbs, ShowsPluginArguments
from accelerate_core.accelerator.tracking_verbs import TrackingVerbs
from accelerate_core.accelerator.training_verbs import TrainingVerbs
from accelerate_core.backend import Backend
from accelerate_core.builtin.memory import clear_device_cache
from accelerate_core.builtin.no_tracking import NoTracking, asks
from accelerate_core.config.enums import DistributedType
from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.config.shown import Shown
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.parts import Tracking
from accelerate_core.data.rng import check_rng_types
from accelerate_core.delegation import attribute
from accelerate_core.distributed import failures
from accelerate_core.distributed import process as runtimes
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import agree
from accelerate_core.errors import warn
from accelerate_core.plugins.discovery import lent, why_without
from accelerate_core.plugins.manager import blaming
from accelerate_core.prepare import run
from accelerate_core.prepare.prepared import Prepared
from accelerate_core.state import AcceleratorState, ProcessVerbs, absent_attribute
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loop import TrainingLoop

if TYPE_CHECKING:
    from accelerate_core.plugins.contributed import PluginArguments, PluginAttributes
else:  # what plugins add follows from what is installed
    PluginArguments, PluginAttributes = dict[str, Any], object

#: Per object given to `prepare`: whether it is moved to the device.
Placement = Sequence[bool | None] | None

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T6 = TypeVar("T6")
T7 = TypeVar("T7")
T8 = TypeVar("T8")


class Accelerator(
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
    """Runs a plain PyTorch training loop on whatever setup the process was started in.

    Args:
        device_placement: move models and batches to the device.
        split_batches: older place of `DataLoaderConfiguration.split_batches`.
        mixed_precision: `no`, `fp16`, `bf16`, `downcast_bf16`, or one a plugin adds.
        gradient_accumulation_steps: micro-batches per optimizer step; see `accumulate`.
        cpu: run on the CPU whatever devices are there; still distributed when launched so.
        dataloader_config: how data is shared out.
        rng_types: generators synchronised at the start of each iteration over a loader.
        log_with: trackers: names, classes, instances, or `"all"`.
        project_dir: root of logs and checkpoints.
        project_config: the same, with naming and retention of checkpoints.
        gradient_accumulation_plugin: accumulation in more detail.
        step_scheduler_with_optimizer: False if schedulers are stepped at other times.
        kwargs_handlers: settings objects of the core and of plugins.
        dynamo_backend: compiler for `torch.compile`.
        dynamo_plugin: compilation in more detail.
        backend: name of a backend plugin, a `Backend` class or instance; default: detected.
        process_group_timeout: seconds a collective may wait.
        upcast_outputs: convert half precision outputs of models to fp32 (default True).
        parallelism_config: sizes of the dimensions of a device mesh, for backends that have one.
        scheduler_steps: how far a prepared scheduler moves when the optimizer steps:
            `"per_process"`, once for each process that reads different data, or `"per_step"`,
            once; the default is the backend's, as in Hugging Face Accelerate.
        preemption_signals: signals, such as "SIGTERM,SIGUSR1", on which all ranks save at the next
            step boundary and leave with status 75; needs automatic checkpoint naming.
        checkpointer: name of the plugin that saves and loads; default: `directory`.
        tracking: name of the plugin that feeds the trackers; default: `queued`.
        loaders: name of the plugin that makes prepared data loaders; default: the core makes them.
        plugin_arguments: arguments of installed plugins.

    Raises:
        UnknownArgumentError: an argument that nobody takes.
        ConfigurationError: a wrong value, with where it came from and what is allowed.
        MissingPluginError: something asked for is not installed, with the pip command.

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
        preemption_signals: str | None = None,
        checkpointer: str | None = None,
        tracking: str | None = None,
        loaders: str | None = None,
        parallelism_config: ParallelismConfig | None = None,
        **plugin_arguments: Unpack[PluginArguments],
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["plugin_arguments"]
        failures.install()
        topology = runtimes.running() or runtimes.launched_topology()
        built = construct(arguments, plugin_arguments, topology)
        self._built = built
        self._closed = False
        self._noted: set[str] = set()
        self.because = built.because
        self.backend = built.backend
        self.precision = built.precision
        self._plugins = built.plugins
        self.hooks = self._plugins.bind_owner(built.backend, built.backend_record, Backend)
        self.device_placement = device_placement
        self.rng_types = check_rng_types(rng_types)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_steps: str = built.because["scheduler_steps"].value
        self.dataloader_config = built.dataloader
        self.project_configuration = built.project
        self.dynamo_plugin = built.dynamo
        handler = built.handlers.get
        self.autocast_handler: AutocastKwargs | None = handler(AutocastKwargs)
        self.init_handler: InitProcessGroupKwargs | None = handler(InitProcessGroupKwargs)
        self.scaler_handler: GradScalerKwargs | None = handler(GradScalerKwargs)
        said = self.autocast_handler and self.autocast_handler.upcast_outputs
        self.upcast_outputs = bool(self.because["upcast_outputs"].value if said is None else said)
        with blaming("check", built.backend_record):
            self.backend.check(self)
        # One that is named is made at once: what is impossible is told before anything is trained.
        needed = self.because["checkpointer"].value is not None
        signals = self.because["preemption_signals"]
        self._saving = Saving(built.parts["checkpointer"], built.project, signals, needed)
        # Made before the ranks compare: its settings have to be alike.
        self._loader_maker = (part := built.parts["loaders"]) and part.make()
        self._process = start_process(self, built)
        try:
            self.precision.check(self)
            agree(self._process, built.facts())
            self._make_parts(log_with)
            if built.unasked:
                self.note_once(built.unasked)
            self._plugins.call_each("on_start", accelerator=self)
            self._saving.attach(partial(run_parts, weakref.ref(self)))
        except BaseException:
            runtimes.release(self)
            raise

    def _make_parts(self, log_with: Any) -> None:
        built = self._built
        self.hooks.mesh(self)  # all ranks make its groups now, in the same order
        self.gradient_state = GradientState(**built.accumulation.to_dict())
        self._collectives = Collectives(self, self.gradient_state, self.dataloader_config)
        self._prepared = Prepared(
            self,
            self._plugins,
            config=self.dataloader_config,
            rng_types=self.rng_types,
            device_placement=self.device_placement,
            data_comm=self._collectives.data_comm,
            loader_maker=self._loader_maker,
        )
        self.scaler: Any | None = None
        if "precision" not in self.backend.owns:
            options = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.scaler = self.precision.scaler(self, options)
        loss_comm = self._collectives.loss_comm
        defers_sync = type(self.backend).no_sync is not Backend.no_sync
        self._training = TrainingLoop(
            self, self.gradient_state, loss_comm, self.scaler, defers_sync
        )
        DistributedType.register(self.distributed_type)
        part = built.parts["tracking"] if asks(log_with) else None
        make: Callable[..., Tracking] = NoTracking if part is None else part.make
        rank = self.process_index, self.num_processes, self.is_main_process
        self._tracking = make(log_with, self.logging_dir, *rank)

    # --- the setup ----------------------------------------------------------------------------

    _runtime: runtimes.Runtime = attribute("_process", "Ranks, device and group.")

    @property
    def distributed_type(self) -> DistributedType:
        """Which kind of setup runs, as the active backend names it."""
        with blaming("distributed_type", self._built.backend_record):
            return cast(DistributedType, DistributedType(self.backend.distributed_type(self)))

    @property
    def state(self) -> AcceleratorState:
        """The setup as user code reads it."""
        return AcceleratorState(self)

    @property
    def device_count(self) -> int:
        """How many devices this world computes on; one per process, unless the backend has more."""
        if not isinstance(count := self.hooks.device_count(self), int) or count < 1:
            raise wrong_answer("device_count", self, count, "a whole number above 0")
        return count

    communicator: Communicator = attribute("_collectives.comm", "The world, on flat tensors.")
    mixed_precision: str = attribute("_built.precision_name", "Name of the precision.")
    mixes_precision: bool = attribute("precision.mixes", "Whether forward runs under autocast.")
    native_amp: bool = mixes_precision
    parallelism_config: ParallelismConfig | None = attribute(
        "_built.parallelism", "The sizes of the mesh's dimensions, None where there is no mesh."
    )
    multi_device: bool = attribute("use_distributed", "Whether more than one device is in use.")
    local_process_count: int = attribute("_process.local_num_processes", "Processes on a machine.")
    group_timeout: timedelta | None = attribute(
        "_process.timeout", "How long a collective may take; None is torch's default."
    )

    # --- preparing ----------------------------------------------------------------------------

    @overload
    def prepare(self, o1: T1, /, *, device_placement: Placement = None) -> T1: ...
    @overload
    def prepare(
        self, o1: T1, o2: T2, /, *, device_placement: Placement = None
    ) -> tuple[T1, T2]: ...
    @overload
    def prepare(
        self, o1: T1, o2: T2, o3: T3, /, *, device_placement: Placement = None
    ) -> tuple[T1, T2, T3]: ...
    @overload
    def prepare(
        self, o1: T1, o2: T2, o3: T3, o4: T4, /, *, device_placement: Placement = None
    ) -> tuple[T1, T2, T3, T4]: ...
    @overload
    def prepare(
        self, o1: T1, o2: T2, o3: T3, o4: T4, o5: T5, /, *, device_placement: Placement = None
    ) -> tuple[T1, T2, T3, T4, T5]: ...
    @overload
    def prepare(
        self,
        o1: T1,
        o2: T2,
        o3: T3,
        o4: T4,
        o5: T5,
        o6: T6,
        /,
        *,
        device_placement: Placement = None,
    ) -> tuple[T1, T2, T3, T4, T5, T6]: ...
    @overload
    def prepare(
        self,
        o1: T1,
        o2: T2,
        o3: T3,
        o4: T4,
        o5: T5,
        o6: T6,
        o7: T7,
        /,
        *,
        device_placement: Placement = None,
    ) -> tuple[T1, T2, T3, T4, T5, T6, T7]: ...
    @overload
    def prepare(
        self,
        o1: T1,
        o2: T2,
        o3: T3,
        o4: T4,
        o5: T5,
        o6: T6,
        o7: T7,
        o8: T8,
        /,
        *,
        device_placement: Placement = None,
    ) -> tuple[T1, T2, T3, T4, T5, T6, T7, T8]: ...
    @overload
    def prepare(self, *args: Any, device_placement: Placement = None) -> Any: ...
    def prepare(self, *args: Any, device_placement: Placement = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; return them in the same order.

        Args:
            args: any of these; other objects are returned as they are.
            device_placement: per object, whether it is moved to the device.

        Raises:
            PrepareError: a model would be left that does not train as asked.

        Example:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        """
        result = run.prepare(self._prepared, args, device_placement)
        never = self.backend.reduces_gradients == "never" and self.num_processes > 1
        if self._prepared.optimizers and never:
            self.note_once(f"Each rank trains its own model: {self.backend.name!r} never reduces.")
        if self._prepared.optimizers and self._built.parts["checkpointer"] is None:
            self.note_once(f"This run cannot be saved: {why_without('checkpointer')}")
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation_mode` applies precision and compilation only."""
        made = run.prepare(self._prepared, [model], [device_placement], evaluation_mode)
        return cast(torch.nn.Module, made[0])

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer, of models prepared before."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one scheduler, of optimizers prepared before."""
        return self.prepare(scheduler)

    # --- the step -----------------------------------------------------------------------------

    @property
    def profile_handler(self) -> Any:
        """The `ProfileKwargs` among `kwargs_handlers`, None if there is none."""
        return self._built.handlers.get(lent("ProfileKwargs"))

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[Any]:
        """Return a context that profiles with `torch.profiler` and yields its profiler.

        Args:
            profile_handler: a `ProfileKwargs`; default: the one among `kwargs_handlers`.

        Raises:
            MissingPluginError: accelerate-tracking, which writes the traces, is not installed.

        Example:
            with accelerator.profile() as profiler:
                accelerator.backward(loss_function(model(x), y))
            accelerator.print(profiler.key_averages().table(row_limit=5))
        """
        return lent("profile")(profile_handler or self.profile_handler, self.process_index)  # type: ignore[no-any-return]

    # --- checkpoints --------------------------------------------------------------------------

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes what is saved once (per machine, if so configured)."""
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
        # The other ranks may be waiting for this one: leave without meeting them.
        with ExitStack() as rest:  # is called backwards, whatever the one before has raised
            rest.callback(self._tracking.finish, failed)
            rest.callback(self._plugins.call_each, "on_error", accelerator=self, error=error)
            self._saving.close(failed=True)

    def end_training(self) -> None:
        """Finish trackers and plugins; the last Accelerator ends the process group.

        Called while an exception is handled or on its way out (in `except` or `finally`), it
        marks the trackers' runs as failed. Each is ended, whatever another raises.
        """
        failed = self._tracking.is_failing()
        if self._closed:
            self._tracking.finish(failed)  # of a run that was started after the first end
            return
        self._closed = True
        with ExitStack() as rest:
            rest.callback(runtimes.release, self)
            rest.callback(self._plugins.call_each, "on_end", accelerator=self)
            rest.callback(self._tracking.finish, failed)
            self._saving.close(failed=False)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release everything prepared, reset `step`, and return None for each object given."""
        self._saving.release()
        self._plugins.call_each("on_free", accelerator=self)
        self._prepared.forget()
        self._training.settle()
        self.gradient_state.forget()
        self.step = 0
        objects = (None,) * len(objects)
        clear_device_cache(garbage_collection=True)
        return list(objects)

    clear = free_memory

    def explain(self) -> str:
        """Tell every value in force and where it came from, one per line, and what plugins say."""
        lines = [f"{name} = {value}  ({origin})" for name, value, origin in self._built.rows()]
        return "\n".join([*lines, *self._plugins.call_each("explain", accelerator=self)])

    def _rows(self) -> list[tuple[str, str, str]]:
        first = ("rank", f"{self.process_index} of {self.num_processes}", self._runtime.because)
        return [first, ("device", str(self.device), ""), *self._built.rows()]

    def __repr__(self) -> str:
        names = ("mixed_precision", "num_processes", "process_index", "device")
        said = "".join(f", {name}={getattr(self, name, None)!s}" for name in names)
        return f"Accelerator(backend={getattr(self.__dict__.get('backend'), 'name', None)}{said})"

    def note_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn, once per text, on the main process, or with `every_rank` on each."""
        if text not in self._noted and (every_rank or self.is_main_process):
            self._noted.add(text)
            warn(text)

    if not TYPE_CHECKING:  # it would hide every misspelt name from type checkers

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or "_plugins" not in self.__dict__:
                raise AttributeError(f"no {name!r} yet: ranks and parts are there from on_start on")
            if hasattr(type(self), name):
                # A property of ours failed inside with an AttributeError: let that one be seen.
                return object.__getattribute__(self, name)
            return self._plugin_attribute(name, "Accelerator")

    def _plugin_attribute(self, name: str, owner: str) -> Any:
        """Return an attribute that an active plugin serves, or what stands for its absence."""
        served: dict[str, Any] = {}
        for attributes in self._plugins.call_each("state_attributes", accelerator=self):
            served.update(attributes)
        if name in served:
            return served[name]
        return absent_attribute(name, owner, [*dir(type(self)), *served])
