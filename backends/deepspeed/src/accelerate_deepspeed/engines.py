"""Engines: one for each model with something to train, and what belongs to it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic
import torch
from torch import nn

from accelerate_core.errors import ConfigurationError, PrepareError, did_you_mean, listing
from accelerate_core.training.scheduler import AcceleratedScheduler
from accelerate_deepspeed import automatic, half
from accelerate_deepspeed.boundary import Boundary
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.dummies import DummyOptim, DummyScheduler
from accelerate_deepspeed.library import rank_environment
from accelerate_deepspeed.optimizers import build_note, check_compiler, for_offload, needs_build
from accelerate_deepspeed.settings import DeepSpeedPlugin
from accelerate_deepspeed.zero import mark_leaves

if TYPE_CHECKING:
    from accelerate_core import AcceleratorView

__all__ = [
    "DeepSpeedEngineWrapper",
    "Engines",
    "Job",
    "Trained",
    "assign",
    "check_disks",
    "check_sections",
    "make_engine",
    "micro_batch",
    "settle_engine",
]


@dataclass(eq=False)
class Job:
    """One model of a `prepare` call, with the optimizer and the schedulers that are its own."""

    model: Any
    optimizer: Any = None
    schedulers: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Trained:
    """An engine that trains, its gradients, and the plugin it was made with."""

    engine: Any
    boundary: Boundary
    plugin: DeepSpeedPlugin
    ended: bool = False


class DeepSpeedEngineWrapper:
    """What `accelerator.deepspeed_engine_wrapped` is: the newest engine, as `engine`.

    The peer's calls `step()` in its `backward`; here the loop does, so this one only looks.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before clipping of the last step; None at stage 0."""
        if self.engine.zero_optimization_stage() == 0:
            return None  # with fp16 DeepSpeed's is that of scaled gradients
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)


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
        foreign = sum(id(parameter) not in owners for parameter in held)
        if foreign:
            raise PrepareError(
                f"The {kind} holds {foreign} parameter(s) that are not in "
                f"{type(job.model.original).__name__}: DeepSpeed trains what is inside of a model. "
                "Make them part of the module."
            )
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


#: Sections that DeepSpeed reads without looking at their other keys.
_LOOSE = {
    "torch_autocast": ("enabled", "dtype", "lower_precision_safe_modules"),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "activation_checkpointing": (
        "partition_activations",
        "contiguous_memory_optimization",
        "cpu_checkpointing",
        "number_checkpoints",
        "synchronize_checkpoint_boundary",
        "profile",
    ),
}


def check_sections(config: HfDeepSpeedConfig) -> None:
    """Check the sections of a config with DeepSpeed's own models of them.

    Raises:
        ConfigurationError: an unknown key, or a value that cannot be.
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "tensor_parallel": TPTrainingConfig,
    }
    for section, model in models.items():
        if config.has(section):
            _check_section(config, section, model)
    for section, known in _LOOSE.items():
        there = config.get_value(section) or {}
        for key in there if isinstance(there, dict) else ():
            if key not in known:
                raise ConfigurationError(
                    f"DeepSpeed has no setting {section}.{key} (in {config.origin})."
                    f"{did_you_mean(str(key), known)}"
                )
    for name in ("optimizer.type", "scheduler.type"):
        section = name.partition(".")[0]
        if config.has(section) and not isinstance(config.get_value(name), str):
            raise ConfigurationError(f"{section} in {config.origin} needs a type, such as AdamW.")
    kind = config.get_value("scheduler.type")
    if kind is not None:
        from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

        if kind not in VALID_LR_SCHEDULES and not hasattr(torch.optim.lr_scheduler, kind):
            raise ConfigurationError(
                f"scheduler.type={kind!r} (in {config.origin}) is not known; DeepSpeed has "
                f"{listing(VALID_LR_SCHEDULES)}.{did_you_mean(kind, VALID_LR_SCHEDULES)}"
            )
    kind = config.get_value("optimizer.type")
    if kind is not None:
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

        if kind.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
            raise ConfigurationError(
                f"optimizer.type={kind!r} (in {config.origin}) is neither DeepSpeed's nor torch's; "
                f"DeepSpeed has {listing(DEEPSPEED_OPTIMIZERS)}."
                f"{did_you_mean(kind.lower(), DEEPSPEED_OPTIMIZERS)}"
            )


def check_disks(config: HfDeepSpeedConfig) -> None:
    """Refuse offload to nvme where the library that writes is missing.

    Raises:
        ConfigurationError: with what to install.
    """
    kinds = ("offload_optimizer", "offload_param")
    names = [f"zero_optimization.{kind}.device" for kind in kinds]
    asked = [name for name in names if config.get_value(name) == "nvme"]
    if not asked:
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigurationError(
            f"{asked[0]}='nvme' ({config.where(asked[0])}) needs DeepSpeed's op async_io, which "
            "cannot be compiled here: install libaio with its headers (Debian: apt install "
            "libaio-dev) and a C++ compiler, or offload to the CPU."
        )


def _check_section(config: HfDeepSpeedConfig, section: str, model: Any) -> None:
    there = config.get_value(section)
    if not isinstance(there, dict):
        raise ConfigurationError(f"{section} of {config.origin} is {there!r}; it takes an object.")
    known = [name for key, info in model.model_fields.items() for name in (key, info.alias) if name]
    try:
        model(**{key: value for key, value in there.items() if value != "auto"})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        text = first["msg"]
        if first["type"] == "extra_forbidden":
            text = f"DeepSpeed has no such setting.{did_you_mean(name, known)}"
        raise ConfigurationError(
            f"{section}.{name}={first.get('input')!r} "
            f"({config.where(f'{section}.{name}')}): {text.rstrip('.')}."
        ) from None
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigurationError(f"{section} of {config.origin}: {error}") from None


def make_engine(
    accelerator: AcceleratorView,
    deepspeed: Any,
    plugin: DeepSpeedPlugin,
    job: Job,
    run: automatic.Run,
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
    automatic.settle_batches(config, run)
    automatic.settle_sizes(config, model)
    automatic.settle_optimizer(
        config, optimizer, scheduler, run.data_ranks, accelerator.split_batches
    )
    settle_engine(config, optimizer is not None)
    automatic.settle_rest(config)
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
    try:
        with rank_environment(accelerator), build_note(op):
            engine, _, _, own_scheduler = deepspeed.initialize(
                dist_init_required=False, **arguments
            )
    except (AssertionError, pydantic.ValidationError) as error:
        raise ConfigurationError(
            f"DeepSpeed refuses the config ({config.origin}): {str(error) or 'no reason is given'}"
        ) from error
    if accelerator.num_processes > 1 and accelerator.parallelism_config.tp_size == 1:
        # It makes the ranks' parameters alike, and leaves buffers as each rank has them.
        for buffer in model.buffers():
            if not buffer.is_meta:
                torch.distributed.broadcast(buffer.detach(), src=0)
    if config.stage == 0 and half.dtype_of(engine) is not None:
        half.mend_stage_0(engine)
    half.wrap_module(engine, not config.is_false("fp16.auto_cast"), accelerator.upcast_outputs)
    job.model.value = engine
    if job.optimizer is not None:
        job.optimizer.value = accelerator.wrap_optimizer(engine.optimizer)
    _put_schedulers(accelerator, engine, job, given, own_scheduler)
    return engine


def _trainable(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def settle_engine(config: HfDeepSpeedConfig, prepared: bool) -> None:
    """Set what this backend needs of the engine: its `step()` is the boundary."""
    name = "managed_gradient_accumulation"
    if config.is_true(name):
        raise ConfigurationError(
            f"{name}=true ({config.where(name)}) lets DeepSpeed count micro-batches; here the "
            "loop says when to step. Leave it out."
        )
    config.set_value(name, False, "the loop says when to step")
    overlap = "zero_optimization.overlap_comm"
    if config.stage == 1 and config.is_true(overlap):
        raise ConfigurationError(
            f"{overlap}=true ({config.where(overlap)}) cannot be with stage 1 and a loop that "
            "says when to step; use stage 2, or leave it out."
        )
    if prepared and not config.has("zero_allow_untested_optimizer"):
        config.set_value("zero_allow_untested_optimizer", True, "an optimizer was prepared")
    if not config.has("steps_per_print"):
        config.set_value("steps_per_print", 2**31, "progress is the loop's to print")


def _put_schedulers(
    accelerator: AcceleratorView, engine: Any, job: Job, given: Any, own_scheduler: Any
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
        #: Id of a parameter -> its engine; only asked where there are several.
        self._owners: dict[int, weakref.ref[Any]] = {}

    def add(self, engine: Any, plugin: DeepSpeedPlugin) -> Trained:
        """Take in an engine that trains."""
        one = Trained(engine, Boundary(engine), plugin)
        engine.accelerate_trained = one
        reference = weakref.ref(engine)
        self._engines.append(reference)
        self._owners.update({id(p): reference for p in engine.module.parameters()})
        return one

    @property
    def trained(self) -> list[Trained]:
        """The engines that are still there, in the order they were made."""
        there = (reference() for reference in self._engines)
        return [engine.accelerate_trained for engine in there if engine is not None]

    def destroy(self) -> None:
        """Let go of all engines and what they hold."""
        self.end()
        for one in self.trained:
            del one.engine.accelerate_trained
        self._engines.clear()
        self._owners.clear()

    def end(self) -> None:
        """Take off the engines' hooks, which hold the models as long as they are on.

        Models can be used and unwrapped after it, and not be trained.
        """
        for one in self.trained:
            if one.ended:
                continue
            one.ended = True
            engine = one.engine
            engine.destroy()
            offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
            # Of stage 3: a list of modules whose forward runs, from which the first is not taken.
            stack: list[Any] = getattr(offload, "FWD_MODULE_STACK", [])
            stack[:] = [module for module in stack if module is not engine.module]

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

    def of_loss(self, loss: torch.Tensor) -> list[Trained]:
        """Return the engines whose parameters a loss depends on.

        With one engine that is it; of several the graph says which: a generator's forward may be
        older than its discriminator's last backward.
        """
        trained = self.trained
        if len(trained) <= 1 or loss.grad_fn is None:
            return trained if loss.grad_fn is not None else []
        found: dict[int, Trained] = {}
        seen: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting and len(found) < len(trained):
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                reference = self._owners.get(id(variable))
                engine = reference() if reference is not None else None
                if engine is not None:
                    found[id(engine)] = engine.accelerate_trained
            waiting += [following for following, _ in node.next_functions if following is not None]
        return [one for one in trained if id(one.engine) in found]
