"""Engines: one for each model with something to train, and what belongs to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate_core.errors import PrepareError
from accelerate_core.step import AcceleratedScheduler
from accelerate_deepspeed import resolve
from accelerate_deepspeed.boundary import Boundary
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.dummies import DummyOptim, DummyScheduler
from accelerate_deepspeed.library import rank_environment
from accelerate_deepspeed.optimizers import build_note, check_compiler, for_offload, needs_build
from accelerate_deepspeed.settings import DeepSpeedPlugin
from accelerate_deepspeed.zero import mark_leaves

if TYPE_CHECKING:
    from accelerate_core import Accelerator

__all__ = ["Job", "Trained", "assign", "check_zero", "make_engine", "micro_batch"]


@dataclass(eq=False)
class Job:
    """One model of a `prepare` call, with the optimizer and the schedulers that are its own."""

    model: Any
    optimizer: Any = None
    schedulers: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Trained:
    """An engine that trains: its gradients, and the optimizer users know it by."""

    engine: Any
    boundary: Boundary
    plugin: DeepSpeedPlugin

    @property
    def optimizer(self) -> Any:
        """The optimizer that `prepare` returned, unwrapped."""
        return self.engine.optimizer


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return all parameters of an optimizer or its stand-in."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def assign(
    models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any]
) -> list[Job]:
    """Match optimizers with models by their parameters, schedulers with optimizers.

    Args:
        models: entries of a plan.
        optimizers: entries; those of a model that is not in this call are an error.
        schedulers: entries.

    Raises:
        PrepareError: an optimizer is of no model of this call, of several, or a model has two.
    """
    jobs = [Job(entry) for entry in models]
    owners = {id(p): job for job in jobs for p in job.model.value.parameters()}
    by_optimizer: dict[int, Job] = {}
    for entry in optimizers:
        kind = type(entry.value).__name__
        held = parameters_of(entry.value)
        mine = {id(job): job for p in held if (job := owners.get(id(p))) is not None}
        if not mine:
            raise PrepareError(
                f"DeepSpeed builds a model and its optimizer together, and prepare got a {kind} "
                "without the model it trains: pass both in one call, "
                "prepare(model, optimizer, ...)."
            )
        if len(mine) > 1:
            names = ", ".join(type(job.model.original).__name__ for job in mine.values())
            raise PrepareError(
                f"One {kind} holds parameters of several models ({names}), and DeepSpeed has an "
                "engine for each model: make an optimizer for each, or put them into one module."
            )
        (job,) = mine.values()
        if job.optimizer is not None:
            raise PrepareError(
                f"{type(job.model.original).__name__} has two optimizers, and a DeepSpeed engine "
                "has one: give one optimizer several parameter groups."
            )
        job.optimizer = entry
        for one in (entry.value, entry.original):
            by_optimizer[id(one)] = job
    training = [job for job in jobs if job.optimizer is not None]
    for entry in schedulers:
        inner = getattr(entry.original, "optimizer", None)
        owner = by_optimizer.get(id(inner))
        if owner is None and len(training) == 1:
            owner = training[0]
        if owner is None and len(jobs) == 1:
            owner = jobs[0]
        if owner is None:
            raise PrepareError(
                f"The {type(entry.original).__name__} is for an optimizer that is not in this "
                "call of prepare: pass them together."
            )
        owner.schedulers.append(entry)
    return jobs


def micro_batch(loaders: Iterable[Any], smallest: bool, parts: int) -> int | None:
    """Return the samples per rank and step that the loaders give, None if none says.

    Args:
        smallest: of several, the smallest; else the largest.
        parts: by how many a loader's batch is split among ranks.
    """
    sizes = []
    for loader in loaders:
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int) and size > 0:
            sizes.append(max(size // parts, 1))
    if not sizes:
        return None
    return min(sizes) if smallest else max(sizes)


def check_zero(config: HfDeepSpeedConfig) -> None:
    """Check the section zero_optimization with DeepSpeed's own model of it.

    Raises:
        ConfigurationError: an unknown key, or a value that cannot be.
    """
    import pydantic
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from accelerate_core.errors import ConfigurationError, did_you_mean

    section = {
        key: value
        for key, value in (config.get_value("zero_optimization") or {}).items()
        if value != "auto"
    }
    known = [
        name
        for key, info in DeepSpeedZeroConfig.model_fields.items()
        for name in (key, info.alias)
        if name
    ]
    try:
        DeepSpeedZeroConfig(**section)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        text = first["msg"]
        if first["type"] == "extra_forbidden":
            text = f"DeepSpeed has no such setting.{did_you_mean(name, known)}"
        raise ConfigurationError(
            f"zero_optimization.{name}={first.get('input')!r} ({config.where('zero_optimization.' + name)}):"
            f" {text.rstrip('.')}."
        ) from None
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"zero_optimization of {config.origin}: {error}") from None


def make_engine(
    accelerator: Accelerator,
    deepspeed: Any,
    plugin: DeepSpeedPlugin,
    job: Job,
    run: resolve.Run,
    mpu: Any = None,
) -> Any:
    """Build the engine of one model and put it, its optimizer and its schedulers into the plan."""
    config = HfDeepSpeedConfig(plugin.hf_ds_config)
    config.because = dict(plugin.hf_ds_config.because)
    model: nn.Module = job.model.value
    optimizer = job.optimizer.value if job.optimizer is not None else None
    if optimizer is None and config.has("optimizer") and not _trainable(model):
        config.del_config_sub_tree("optimizer")
    scheduler = job.schedulers[0].value if job.schedulers else None
    resolve.settle_batches(config, run)
    resolve.settle_sizes(config, model)
    resolve.settle_optimizer(
        config, optimizer, scheduler, run.data_ranks, accelerator.split_batches
    )
    _settle_engine(config, optimizer)
    resolve.settle_rest(config)
    plugin.hf_ds_config = config
    if plugin.transformer_moe_cls_names:
        mark_leaves(deepspeed, model, list(plugin.transformer_moe_cls_names))
    given = optimizer
    if isinstance(optimizer, DummyOptim):
        given = optimizer.optimizer_callable
    elif optimizer is not None:
        given = for_offload(config, optimizer)
    op = needs_build(config) if given is None else None
    if op is not None:
        check_compiler(op)
    arguments: dict[str, Any] = {"model": model, "config": config.config, "optimizer": given}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif given is None and config.has("optimizer"):
        arguments["model_parameters"] = [p for p in model.parameters() if p.requires_grad]
    if mpu is not None:
        arguments["mpu"] = mpu
    with rank_environment(accelerator), build_note(op):
        engine, _, _, own_scheduler = deepspeed.initialize(dist_init_required=False, **arguments)
    if accelerator.num_processes > 1 and accelerator.parallelism_config.tp_size == 1:
        # It makes the ranks' parameters alike, and leaves buffers as each rank has them.
        for buffer in model.buffers():
            if not buffer.is_meta:
                torch.distributed.broadcast(buffer.detach(), src=0)
    job.model.value = engine
    if job.optimizer is not None:
        job.optimizer.value = accelerator.wrap_optimizer(engine.optimizer)
    _put_schedulers(accelerator, engine, job, given, own_scheduler)
    return engine


def _trainable(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _settle_engine(config: HfDeepSpeedConfig, optimizer: Any) -> None:
    """Set what this backend needs of the engine: its `step()` is the boundary."""
    name = "managed_gradient_accumulation"
    if config.is_true(name):
        from accelerate_core.errors import ConfigurationError

        raise ConfigurationError(
            f"{name}=true ({config.where(name)}) lets DeepSpeed count micro-batches; here the "
            "loop says when to step. Leave it out."
        )
    config.set_value(name, False, "the loop says when to step")
    overlap = "zero_optimization.overlap_comm"
    if config.stage == 1 and config.is_true(overlap):
        from accelerate_core.errors import ConfigurationError

        raise ConfigurationError(
            f"{overlap}=true ({config.where(overlap)}) cannot be with stage 1 and a loop that "
            "says when to step; use stage 2, or leave it out."
        )
    if optimizer is not None and not config.has("zero_allow_untested_optimizer"):
        config.set_value("zero_allow_untested_optimizer", True, "an optimizer was prepared")
    if not config.has("steps_per_print"):
        config.set_value("steps_per_print", 2**31, "progress is the loop's to print")


def _put_schedulers(
    accelerator: Accelerator, engine: Any, job: Job, given: Any, own_scheduler: Any
) -> None:
    wrapped = job.optimizer.value if job.optimizer is not None else None
    for entry in job.schedulers:
        scheduler = entry.value
        if isinstance(scheduler, DummyScheduler):
            if scheduler.lr_scheduler_callable is not None:
                inner = scheduler.lr_scheduler_callable(engine.basic_optimizer)
            else:
                inner = own_scheduler
                engine.lr_scheduler = None  # stepped by the loop, as every other
        else:
            inner = scheduler
            if getattr(inner, "optimizer", None) is not None and given is not None:
                inner.optimizer = engine.basic_optimizer
        # One step per optimizer step: DeepSpeed's users count a schedule in those.
        entry.value = AcceleratedScheduler(
            inner,
            [wrapped] if wrapped is not None else [],
            gradient_state=accelerator.gradient_state,
            num_processes=1,
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches,
        )


class Engines:
    """All engines of one Accelerator, and which of them a loss is of."""

    def __init__(self) -> None:
        # An engine goes when its model is let go of.
        self._engines: list[weakref.ref[Any]] = []
        #: Engines whose forward has run with gradients since the last backward, newest last.
        self._touched: list[weakref.ref[Any]] = []
        self._last: weakref.ref[Any] | None = None

    def add(self, engine: Any, plugin: DeepSpeedPlugin) -> Trained:
        """Take in an engine that trains."""
        one = Trained(engine, Boundary(engine), plugin)
        engine.accelerate_trained = one
        self._engines.append(weakref.ref(engine))
        reference = weakref.ref(one)
        touched = self._touched

        def touch(*_: Any) -> None:
            if torch.is_grad_enabled() and (not touched or touched[-1] is not reference):
                touched.append(reference)

        engine.register_forward_pre_hook(touch)
        return one

    @property
    def trained(self) -> list[Trained]:
        """The engines that are still there, in the order they were made."""
        there = (reference() for reference in self._engines)
        return [engine.accelerate_trained for engine in there if engine is not None]

    def of_optimizer(self, optimizer: Any) -> Trained | None:
        """Return the engine an optimizer was made for."""
        for one in self.trained:
            if optimizer is one.engine.optimizer or optimizer is one.engine.basic_optimizer:
                return one
        return None

    def of_model(self, model: Any) -> Trained | None:
        """Return the engine of a prepared model or of the module inside."""
        for one in self.trained:
            if model is one.engine or model is one.engine.module:
                return one
        return None

    def for_backward(self) -> list[Trained]:
        """Return the engines that have computed since the last backward, newest last."""
        found = [one for reference in self._touched if (one := reference()) is not None]
        found = list({id(one): one for one in found}.values())
        self._touched.clear()
        if found:
            self._last = weakref.ref(found[-1])
            return found
        last = self._last() if self._last is not None else None
        return [last] if last is not None else []

    def holding(self, parameters: Iterable[torch.Tensor]) -> list[Trained]:
        """Return the engines any of these parameters is of."""
        given = {id(parameter) for parameter in parameters}
        return [
            one
            for one in self.trained
            if any(id(p) in given for p in one.engine.module.parameters())
        ]
