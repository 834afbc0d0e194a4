"""The facade: short methods, each handing over to the one place that does the work."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.assemble import assemble
from accelerate_core.backend import Backend
from accelerate_core.builtin.affinity import follow_cpu_affinity
from accelerate_core.builtin.memory import release_memory
from accelerate_core.builtin.no_tracking import NoTracking, asks
from accelerate_core.compatibility import check_device
from accelerate_core.config.enums import DistributedType
from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig
from accelerate_core.contract.parts import Tracking
from accelerate_core.contract.topology import Topology, read_topology
from accelerate_core.data.rng import check_rng_types
from accelerate_core.distributed import failures
from accelerate_core.distributed import process as runtimes
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.rank_agreement import agree
from accelerate_core.errors import ConfigurationError
from accelerate_core.facade.keeping import Keeping
from accelerate_core.facade.preparing import Preparing
from accelerate_core.facade.recording import Recording
from accelerate_core.facade.stepping import Stepping
from accelerate_core.facade.talking import Talking
from accelerate_core.facade.training_state import RunState
from accelerate_core.plugins.manager import ActivePlugins, blaming
from accelerate_core.plugins.selection import plugin_arguments
from accelerate_core.state import absent_attribute
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.items import ItemCount

if TYPE_CHECKING:
    from accelerate_core.contract.parts import Checkpointer


class _ShowsPluginArguments(type):
    """`inspect.signature(Accelerator)` lists what the installed plugins take, too."""

    @property
    def __signature__(cls) -> inspect.Signature:
        _, *parameters = inspect.signature(cast(Any, cls).__init__).parameters.values()
        extra = sorted(plugin_arguments() - {one.name for one in parameters})
        kind = inspect.Parameter.KEYWORD_ONLY
        lent = [inspect.Parameter(name, kind, default=None) for name in extra]
        return inspect.Signature([*parameters[:-1], *lent])


class Accelerator(
    Preparing, Stepping, Talking, Keeping, Recording, metaclass=_ShowsPluginArguments
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
        preemption_signals: str | None = None,
        checkpointer: str | None = None,
        tracking: str | None = None,
        loaders: str | None = None,
        parallelism_config: ParallelismConfig | None = None,
        **plugin_arguments: Any,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["plugin_arguments"]
        running = runtimes.running()
        topology = running.topology if running else read_topology(os.environ)
        built = assemble(arguments, plugin_arguments, topology)
        self._built = built
        self.because = built.because
        self.backend = built.backend
        self.precision = built.precision
        self.plugins = ActivePlugins(Backend)
        self.plugins.add(built.backend, built.selection.record, built.selection.because)
        self.plugins.add(
            built.precision, built.precision_record, built.because["mixed_precision"].origin
        )
        for record, extension, why in built.extensions:
            self.plugins.add(extension, record, why)
        self.hooks = self.plugins.bind_owner(built.backend, built.selection.record, Backend)
        with blaming("check", built.selection.record):
            self.backend.check(self)
        self._checkpointer = self._wanted_checkpointer()
        self._start_runtime()
        try:
            self._agree()
            self._set_up(arguments, log_with)
            self.plugins.call_each("on_start", accelerator=self)
            if self._checkpointer is not None:
                self._checkpointer.attach(RunState(self))
        except BaseException:
            runtimes.release(self)
            raise

    def _wanted_checkpointer(self) -> Checkpointer | None:
        """Return the checkpointer if the settings ask for something of it; else it is made later."""
        signals, project = self.because["preemption_signals"], self._built.project
        numbered = project.automatic_checkpoint_naming
        reads_gradients = self.backend.supports.get("gradients", True)
        if not (signals.value or numbered or project.total_limit is not None) and reads_gradients:
            return None
        made = self._make_checkpointer(signals.value)
        if signals.value and (project.project_dir is None or not numbered):
            raise ConfigurationError(
                f"preemption_signals ({signals.origin}) needs a place to save to: "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        return made

    def _start_runtime(self) -> None:
        built, values = self._built, self.because
        group = built.handler(InitProcessGroupKwargs)
        if (running := runtimes.running()) is not None:
            check_device(built, running.device.type, "where this process runs already")

        def choose(topology: Topology, cpu: bool) -> Any:
            chosen = self.hooks.device(self, topology, cpu)
            check_device(built, chosen.type, "what torch finds on this machine")
            return chosen

        self._process = runtimes.acquire(
            self,
            cpu=values["cpu"].value,
            debug=values["debug"].value,
            device=values["torch_device"].value,
            timeout=built.timeout,
            comm_backend=group.backend if group else None,
            init_method=group.init_method if group else None,
            needs_group=self.backend.needs_group,
            choose_device=choose,
            init_group=partial(self.hooks.init_process_group, self),
        )
        follow_cpu_affinity(self._process.local_process_index, os.environ)

    def _agree(self) -> None:
        self.precision.check(self)
        agree(self._process, self._built.facts())

    def _set_up(self, arguments: Mapping[str, Any], log_with: Any) -> None:
        built = self._built
        self.closed = False
        self.device_placement = arguments["device_placement"]
        self.rng_types = check_rng_types(arguments["rng_types"])
        self.step_scheduler_with_optimizer = arguments["step_scheduler_with_optimizer"]
        self.dataloader_config = built.dataloader
        self.project_configuration = built.project
        self.dynamo_plugin = built.dynamo
        self.upcast_outputs = bool(self.because["upcast_outputs"].value)
        self.autocast_handler = built.handler(AutocastKwargs)
        if self.autocast_handler is not None and self.autocast_handler.upcast_outputs is not None:
            self.upcast_outputs = self.autocast_handler.upcast_outputs
        self.profile_handler = built.handler(ProfileKwargs)
        scaling = built.handler(GradScalerKwargs)
        self._scaler = None
        if "precision" not in self.backend.owns:
            options = scaling.to_kwargs() if scaling else {}
            self._scaler = self.precision.scaler(self, options)
        self._unscaled: set[int] = set()
        self._scaled_steps: set[int] = set()
        self.gradient_state = GradientState(**_fields(built.accumulation))
        self.step = 0
        self.hooks.mesh(self)  # all ranks make its groups now, in the same order
        self._divides_loss = "accumulation" not in self.backend.owns
        self._items = ItemCount()
        self._counted_models = ()
        self._communicator = self._make_communicator("world")
        self._data_communicator = self._make_communicator("data")
        self._loss_communicator = self._make_communicator("loss")
        self.models = []
        self.optimizers = []
        self.schedulers = []
        self.loaders = []
        self.registered_objects = []
        self.replaced_parameters = WeakIdKeyDictionary()
        self.save_state_pre_hooks = OrderedDict()
        self.load_state_pre_hooks = OrderedDict()
        self.flag_tensor = None
        self._noted: set[str] = set()
        self._step_listeners = self.plugins.implementations("on_step_end")
        DistributedType.register(str(self.distributed_type))
        chosen = built.parts["tracking"] if asks(log_with) else None
        make: Callable[..., Tracking] = NoTracking if chosen is None else chosen.make
        self._tracking = make(
            log_with, self.logging_dir, self.process_index, self.num_processes, self.is_main_process
        )

    def _make_communicator(self, scope: Any) -> Communicator:
        rank, size = self.process_index, self.num_processes
        if scope == "data":
            rank, size = self.hooks.data_shard(self)
        elif scope == "loss":
            rank, size = self.hooks.loss_shard(self)
        return Communicator(
            rank=rank,
            size=size,
            device=self.device,
            hooks=self.hooks,
            accelerator=self,
            scope=scope,
            debug=bool(self.because["debug"].value),
            new_group=lambda ranks: self.hooks.new_group(self, ranks, "cpu"),
        )

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Accelerator:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.end_training()
            return
        failed = failures.is_failure(error)
        if self.closed:
            self._tracking.finish(failed)
            return
        if self._checkpointer is not None:
            self._checkpointer.close(failed=True)
        self.plugins.call_each("on_error", accelerator=self, error=error)
        self._tracking.finish(failed)
        self.closed = True
        # The other ranks may be waiting for this one: leave without meeting them.

    def end_training(self) -> None:
        """Finish trackers and plugins; the last Accelerator ends the process group.

        Called while an exception is handled or on its way out (in `except` or `finally`), it
        marks the trackers' runs as failed.
        """
        failed = self._tracking.is_failing()
        if self.closed:
            self._tracking.finish(failed)  # of a run that was started after the first end
            return
        if self._checkpointer is not None:
            self._checkpointer.close(failed=False)
        self._tracking.finish(failed)
        self.plugins.call_each("on_end", accelerator=self)
        self.closed = True
        runtimes.release(self)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release everything prepared, reset `step`, and return None for each object given."""
        if self._checkpointer is not None:
            self._checkpointer.release()
        self.plugins.call_each("on_free", accelerator=self)
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            cast("list[Any]", held).clear()
        self.settle_scale()
        self.replaced_parameters = WeakIdKeyDictionary()
        self.gradient_state.forget()
        self.step = 0
        return cast("list[Any]", release_memory(*objects))

    def clear(self, *objects: Any) -> list[Any]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)

    def explain(self) -> str:
        """Tell every value in force and where it came from, one per line."""
        lines = [
            f"{name} = {value.value!r}  ({value.origin})" for name, value in self.because.items()
        ]
        lines += [
            f"{name} = {value.value!r}  ({value.origin})"
            for name, value in self._built.plugin_settings().items()
        ]
        lines += [
            f"plugin {record.kind} {record.label}: {why}" for record, _, why in self.plugins.plugins
        ]
        lines += [
            f"plugin {part.record.kind} {part.record.label}: {part.because}"
            for part in self._built.parts.values()
            if part is not None
        ]
        return "\n".join(lines)

    def note_once(self, text: str, *, every_rank: bool = False) -> None:
        """Warn, once per text, on the main process."""
        if text not in self._noted and (every_rank or self.is_main_process):
            self._noted.add(text)
            warnings.warn(text, stacklevel=3)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "plugins" not in self.__dict__:
            raise AttributeError(name)
        if hasattr(type(self), name):
            # A property of ours failed inside with an AttributeError: let that one be seen.
            return object.__getattribute__(self, name)
        return self.plugin_attribute(name, "Accelerator")

    def plugin_attribute(self, name: str, owner: str) -> Any:
        """Return an attribute that an active plugin serves, or what stands for its absence."""
        served: dict[str, Any] = {}
        for attributes in self.plugins.call_each("state_attributes", accelerator=self):
            served.update(attributes)
        if name in served:
            return served[name]
        return absent_attribute(name, owner, [*dir(type(self)), *served])


def _fields(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
