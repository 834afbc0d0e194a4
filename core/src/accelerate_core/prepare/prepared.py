"""The prepared objects of one Accelerator, and how to prepare one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_core.backend import Backend
from accelerate_core.backend.precision import Precision
from accelerate_core.booleans import env_flag
from accelerate_core.builtin.compiled import plain_keys, strip_compiled, uncompiled
from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.contract.hooks import wrong_answer
from accelerate_core.contract.members import GradientReducer, ObjectKind, PlanEntryView
from accelerate_core.contract.parts import PreparedLoader, check_members
from accelerate_core.contract.topology import Process
from accelerate_core.data.device_feed import feed as move_batches
from accelerate_core.data.loader import LoaderOptions
from accelerate_core.data.prepare_loader import override_even_batches, prepare_loader, reshare
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import PluginConflictError, PrepareError, listing
from accelerate_core.plugins.factory import Part, attribute_methods
from accelerate_core.plugins.manager import BoundHooks, SharedHooks
from accelerate_core.prepare.external_loader import ExternalLoader
from accelerate_core.prepare.plan import PreparePlan
from accelerate_core.training.forward import unwrap_forward, wrap_forward
from accelerate_core.training.gradient_state import GradientState
from accelerate_core.training.loss_scaler import LossScaler
from accelerate_core.training.metric import SharedMetric, StepArguments
from accelerate_core.training.optimizer import AcceleratedOptimizer
from accelerate_core.training.scheduler import AcceleratedScheduler
from accelerate_core.training.trainable import TrainableRecord


@dataclass
class PrepareOptions:
    """The options of `prepare`; a script may change them.

    Attributes:
        dataloader_config: how ranks share data.
        rng_types: generators synchronised at the start of each iteration over a loader.
        device_placement: whether models and batches are moved to the device.
        step_scheduler_with_optimizer: whether schedulers step when optimizers do.
        scheduler_steps: how far a scheduler moves then, with its source.
        autocast_handler: options of autocast; None for the defaults.
        upcast_outputs: whether half precision outputs of models become fp32.
        dynamo_plugin: the compiler's settings.
    """

    dataloader_config: DataLoaderConfiguration
    rng_types: Sequence[str]
    device_placement: bool
    step_scheduler_with_optimizer: bool
    scheduler_steps: SourcedValue
    autocast_handler: AutocastKwargs | None
    upcast_outputs: bool
    dynamo_plugin: TorchDynamoPlugin


@dataclass
class PreparedObjects:
    """The prepared objects of one Accelerator, in the order in which they were prepared."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    #: `DataLoaderShard`s, or loaders of a plugin's own class.
    loaders: list[Any] = field(default_factory=list)
    #: Which parameters of the models are trained, if anything depends on it.
    trainable: list[TrainableRecord] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all of them, in place."""
        objects: tuple[list[Any], ...] = (
            self.models,
            self.optimizers,
            self.schedulers,
            self.loaders,
            self.trainable,
        )
        for members in objects:
            members.clear()

    def __contains__(self, obj: object) -> bool:
        """Return whether this very object was prepared."""
        held = (*self.models, *self.optimizers, *self.schedulers, *self.loaders)
        return id(obj) in map(id, held)


@dataclass(kw_only=True, eq=False)
class Prepared:
    """The prepared objects of one Accelerator, and how to prepare one.

    Args:
        hooks: the hooks of the active backend.
        shared_hooks: the hooks that every active plugin may implement.
        backend: the active backend.
        precision: the active precision.
        prepare_precision: the precision's `prepare`, bound to the Accelerator.
        objects: the lists that `prepare` fills.
        options: the options of `prepare`.
        process: ranks and device.
        world: the communicator of all ranks.
        data: the communicator of the ranks that read different samples.
        metrics: combines the metrics of schedulers over the ranks.
        gradient_state: the position in the accumulation cycle.
        loss_scaler: None if losses are not scaled.
        make_loader: a plugin's function that is asked for loaders before the core; None without one.
        loader_plugin: that plugin.
        warn_once: warns once per text, on the main process.
    """

    hooks: BoundHooks
    shared_hooks: SharedHooks
    backend: Backend
    precision: Precision
    prepare_precision: Callable[[PreparePlan], None]
    objects: PreparedObjects
    options: PrepareOptions
    process: Process
    world: Communicator
    data: Communicator
    metrics: SharedMetric
    gradient_state: GradientState
    loss_scaler: LossScaler | None
    make_loader: Callable[[Any], PreparedLoader | None] | None
    loader_plugin: Part | None
    warn_once: Callable[[str], None]
    #: Parameters that were replaced: old -> (prepared model, name).
    replaced_parameters: WeakIdKeyDictionary = field(
        default_factory=WeakIdKeyDictionary, init=False
    )

    def __post_init__(self) -> None:
        self._step_listeners = self.shared_hooks.implementations("on_step_end")
        # One process has no gradients to share, and without a scaler any dtype can be trained.
        self._watches_trainable = (
            self.process.num_processes > 1
            or self.loss_scaler is not None
            or self.backend.reduces_gradients == "engine"
            or "optimizer" in self.backend.owns
        )

    def forget(self) -> None:
        """Forget everything that was prepared."""
        self.objects.clear()
        self.replaced_parameters.clear()

    def use_reducer(self, entry: PlanEntryView) -> None:
        """Let a plugin that returns a reducer average the gradients of a model that is trained.

        Raises:
            PluginConflictError: several plugins returned a reducer.
        """
        asked = (
            () if entry.evaluation_mode else self.shared_hooks.implementations("reduce_gradients")
        )
        answers = [(self.shared_hooks.call(one, model=entry.value), one.record) for one in asked]
        found = [(reducer, record) for reducer, record in answers if reducer is not None]
        if len(found) > 1:
            labels = listing([record.label for _, record in found])
            raise PluginConflictError(
                f"{labels} each returned a reducer from reduce_gradients, but only one plugin can average "
                "the gradients. Disable the others with ACCELERATE_DISABLED_PLUGINS=NAME."
            )
        for reducer, record in found:
            check_members(reducer, GradientReducer, f"The reducer of {record.label}")
            attribute_methods(reducer, record, ("all_reduce", "reduce_scatter"))
            self.hooks.use_reducer(entry.value, reducer)

    # --- models -------------------------------------------------------------------------------

    def mix_precision(self, model: torch.nn.Module) -> None:
        """Run a model's forward under autocast, if the precision has one and the core applies it."""
        if "precision" in self.backend.owns or not self.precision.mixes:
            return
        handler = self.options.autocast_handler
        context = partial(self.hooks.holding().autocast, model, handler)
        wrap_forward(model, context, self.options.upcast_outputs)

    def prepare_data_loader(self, data_loader: Any, *options: Any) -> Any:
        """Prepare one loader that the user passed by itself."""
        made = self.wrap_loader(data_loader, *options)
        self.shared_hooks.call_each("on_prepared", given=[data_loader], prepared=[made])
        return made

    def wrap_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader: this rank's part of the data."""
        if data_loader in self.objects:
            return data_loader
        options = self.options
        on_device = options.device_placement if device_placement is None else device_placement
        prepared: Any = None
        if self.make_loader is not None and slice_fn_for_dispatch is None:
            prepared = self.make_loader(data_loader)
        if prepared is None or self.loader_plugin is None:
            prepared = self._core_loader(data_loader, on_device, slice_fn_for_dispatch)
        else:
            prepared = ExternalLoader(prepared, self.loader_plugin.record, self.gradient_state)
            prepared.put_on_device = on_device
            prepared.even_batches = options.dataloader_config.even_batches
        self.objects.loaders.append(prepared)
        return prepared

    def _core_loader(
        self, data_loader: Any, on_device: bool, slice_fn: Callable[..., Any] | None
    ) -> PreparedLoader:
        index, count = self.hooks.data_shard()
        fixed = self.hooks.fixed_batch()
        if fixed is not None and (not isinstance(fixed, int) or fixed < 1):
            wanted = "None or a whole number above 0"
            raise wrong_answer("fixed_batch", self.backend.name, fixed, wanted)
        config = self.options.dataloader_config
        options = LoaderOptions(
            config=config,
            num_processes=count,
            process_index=index,
            device=self.process.device,
            put_on_device=on_device,
            rng_types=self.options.rng_types,
            slice_fn_for_dispatch=slice_fn,
            comm=self.data,
            order_comm=self.world,
            gradient_state=self.gradient_state,
            feed=self._feed(config.non_blocking) if on_device else None,
            feed_always=self._feeds_itself(),
            fixed_batch=fixed,
        )
        return prepare_loader(data_loader, options)

    def reshare(self) -> None:
        """Divide the rest of the data of all loaders over the current ranks."""
        for loader in self.objects.loaders:
            reshare(loader, self.data.rank, self.data.size)

    def _feeds_itself(self) -> bool:
        """Whether the backend has its own `feed_device`, which is called even if no move is needed."""
        return self.hooks.is_overridden("feed_device")

    def _feed(self, non_blocking: bool) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """Return the function that moves batches to the device.

        The core's own function needs no Accelerator, so the loader does not keep it alive.
        """
        if not self._feeds_itself():
            device = self.process.device
            return lambda batches: move_batches(batches, device, non_blocking)
        feed_device = self.hooks.holding().feed_device
        return lambda batches: feed_device(batches, non_blocking)

    def remember(self, kind: str, value: Any, evaluation: bool = False) -> None:
        """Keep a prepared object for saving, unwrapping and `free_memory`."""
        if kind == "model" and not evaluation:
            self.objects.models.append(value)
            if self._watches_trainable:
                record = TrainableRecord(value, self.inner_model(value))
                self.objects.trainable.append(record)
        elif kind == "optimizer":
            self.objects.optimizers.append(value)
        elif kind == "scheduler":
            self.objects.schedulers.append(value)

    def ask_classification(self, obj: Any) -> list[ObjectKind]:
        """Ask the active plugins what kind of object this is."""
        return self.shared_hooks.call_each("classify", obj=obj)

    # --- optimizers and schedulers ------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Any) -> AcceleratedOptimizer:
        """Return the optimizer wrapped for gradient accumulation."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        return AcceleratedOptimizer(
            optimizer,
            gradient_state=self.gradient_state,
            hooks=self.hooks.holding(),
            loss_scaler=self.loss_scaler,
            after_step=self._announce_step if self._step_listeners else None,
        )

    def _announce_step(self, optimizer: Any) -> None:
        for listener in self._step_listeners:  # runs in every step, so results are not collected
            self.shared_hooks.call(listener, optimizer=optimizer)

    def wrap_scheduler(
        self, scheduler: Any, optimizers: Sequence[AcceleratedOptimizer]
    ) -> AcceleratedScheduler:
        """Return a scheduler that follows its optimizers, by the active rule."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        _, count = self.hooks.data_shard()
        rule = self.options.scheduler_steps
        follows = self.options.step_scheduler_with_optimizer
        announce = None
        if count > 1 and self.process.process_index == 0:
            announce = partial(
                _announce, type(scheduler).__name__, rule, self.metrics.rule, count, follows
            )
        return AcceleratedScheduler(
            scheduler,
            optimizers,
            gradient_state=self.gradient_state,
            num_processes=count if rule.value == "per_process" else 1,
            step_with_optimizer=follows,
            split_batches=self.options.dataloader_config.split_batches,
            arguments=StepArguments(scheduler, self.metrics),
            on_first_step=announce,
        )

    def wrapper_of(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the prepared optimizer that is or wraps `optimizer`."""
        found = (one for one in self.objects.optimizers if optimizer in (one, one.optimizer))
        return next(found, None)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map distributes the model over several devices."""
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(found is not None and len(set(found.values())) > 1 for found in maps)

    def verify_placeable(self, model: torch.nn.Module) -> None:
        """Refuse a model with a device map on several processes, which all need the whole model.

        Raises:
            PrepareError: the model is distributed over devices.
        """
        bypass = env_flag(os.environ, "ACCELERATE_BYPASS_DEVICE_MAP")
        if self.process.num_processes > 1 and not bypass and self.verify_device_map(model):
            raise PrepareError(
                "A model that a device map such as 'auto' distributes over devices cannot be trained on "
                "several processes. Load it without device_map (or set ACCELERATE_BYPASS_DEVICE_MAP=true)."
            )

    def inner_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model without the wrappers of the backend and of `torch.compile`."""
        return uncompiled(self.hooks.unwrap_model(uncompiled(model)))

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the user's model inside a prepared one."""
        inner = self.inner_model(model)
        if not keep_torch_compile:
            inner = strip_compiled(inner)
        if not keep_fp32_wrapper:
            unwrap_forward(inner)
        return inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a prepared model."""
        if not unwrap:
            return dict(model.state_dict())
        inner = self.inner_model(model)
        return plain_keys(inner, self.precision.plain_state(inner, self.hooks.consolidate(model)))

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may have different numbers of batches."""
        stack = ExitStack()
        if self.process.num_processes == 1:
            return stack
        if not self.backend.supports.get("join", False):
            self.warn_once(
                f"join_uneven_inputs has no effect: backend {self.backend.name!r} does not support it."
            )
            return stack
        if even_batches is not None:
            stack.enter_context(override_even_batches(self.objects.loaders, even_batches))
        stack.enter_context(self.metrics.uneven_inputs())
        self.gradient_state.uneven_inputs = True
        stack.enter_context(self.hooks.join_uneven_inputs(joinables))
        return stack


#: What a scheduler gets with each value of `scheduler_metric`.
_METRICS = {
    "mean": "the mean of the metrics of {count} processes",
    "rank_0": "the metric of rank 0",
    "local": "each process's own metric, so learning rates may differ",
}


def _announce(
    kind: str,
    rule: SourcedValue,
    metric_rule: SourcedValue,
    count: int,
    follows: bool,
    steps: int,
    metric: bool,
) -> None:
    """Print how far a scheduler moves at its first step, and with which metric.

    Args:
        kind: the name of its class.
        rule, metric_rule: `scheduler_steps` and `scheduler_metric`.
        count: the number of processes.
        follows: whether it moves when the optimizer steps.
        steps: how many steps it moves.
        metric: whether it got a metric.
    """
    when = "whenever the optimizer steps" if follows else "in each call"
    if metric:
        source = f"scheduler_metric={metric_rule.value!r}: {metric_rule.origin}"
        change = "Other values of scheduler_metric change this."
        moves = f"one step {when}, with {_METRICS[metric_rule.value].format(count=count)}"
    elif not follows:
        return
    else:
        other = "per_step" if rule.value == "per_process" else "per_process"
        source = f"scheduler_steps={rule.value!r}: {rule.origin}"
        change = f"scheduler_steps={other!r} changes this."
        moves = f"{f'{steps} steps, one for each process,' if steps > 1 else 'one step'} {when}"
        if steps == 1 and rule.value == "per_process":
            return  # an epoch was passed, or the batch size is for all processes
    print(f"accelerate-core: {kind} moves {moves} ({source}). {change}", file=sys.stderr)
