"""Create engines: match models with optimizers and schedulers, and complete their config."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pydantic
import torch
from torch import nn

from accelerate_core.plugin import (
    AcceleratorView,
    ConfigurationError,
    PrepareError,
    convert_to_fp32,
    did_you_mean,
    listing,
    map_tensors,
)
from accelerate_deepspeed import automatic
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.library import rank_environment
from accelerate_deepspeed.optimizers import (
    DummyOptim,
    DummyScheduler,
    build_note,
    check_compiler,
    for_offload,
    needs_build,
)
from accelerate_deepspeed.settings import DeepSpeedPlugin


@dataclass(eq=False)
class Job:
    """One model of a `prepare` call, with its optimizer and schedulers."""

    model: Any
    optimizer: Any = None
    schedulers: list[Any] = field(default_factory=list)


def assign(plan: Any) -> list[Job]:
    """Match a plan's optimizers with models by their parameters, and schedulers with optimizers.

    Raises:
        PrepareError: an optimizer or a scheduler doesn't match exactly one model.
    """
    jobs = [Job(entry) for entry in plan.of_kind("model")]
    owners = {id(p): job for job in jobs for p in job.model.value.parameters()}
    by_optimizer: dict[int, Job] = {}
    for entry in plan.of_kind("optimizer"):
        kind = type(entry.value).__name__
        held = [p for group in entry.value.param_groups for p in group["params"]]
        mine = {id(job): job for p in held if (job := owners.get(id(p))) is not None}
        if not mine:
            raise PrepareError(
                f"prepare received a {kind} without its model, but DeepSpeed needs both together. "
                "Pass them in the same call: prepare(model, optimizer, ...)."
            )
        if len(mine) > 1:
            names = ", ".join(type(job.model.original).__name__ for job in mine.values())
            raise PrepareError(
                f"One {kind} has parameters of several models ({names}), but DeepSpeed has a "
                "separate engine for each model. Create an optimizer for each model, or put the "
                "models into one module."
            )
        (job,) = mine.values()
        foreign = sum(id(parameter) not in owners for parameter in held)
        if foreign:
            raise PrepareError(
                f"The {kind} has {foreign} parameter(s) that are not in "
                f"{type(job.model.original).__name__}. DeepSpeed can only train parameters of the "
                "model. Make them a part of it."
            )
        if job.optimizer is not None:
            raise PrepareError(
                f"{type(job.model.original).__name__} has two optimizers, but a DeepSpeed engine "
                "supports one. Use one optimizer with several parameter groups."
            )
        job.optimizer = entry
        for one in (entry.value, entry.original):
            by_optimizer[id(one)] = job
    trained = [job for job in jobs if job.optimizer is not None]
    only = None
    if len(trained) == 1:
        only = trained[0]
    elif len(jobs) == 1:
        only = jobs[0]
    for entry in plan.of_kind("scheduler"):
        owner = by_optimizer.get(id(getattr(entry.original, "optimizer", None)), only)
        if owner is None:
            raise PrepareError(
                f"The {type(entry.original).__name__} belongs to an optimizer that is not in this "
                "call of prepare. Pass them together."
            )
        owner.schedulers.append(entry)
    return jobs


def micro_batch(loaders: Iterable[Any], smallest: bool, parts: int) -> int | None:
    """Return the number of samples per rank and forward, or None if no loader determines it.

    Args:
        smallest: whether to use the smallest batch size of several loaders, else the largest.
        parts: number of ranks over which a loader's batch is split.
    """
    sizes = []
    for loader in loaders:
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if isinstance(size, int) and size > 0:
            sizes.append(max(size // parts, 1))
    if smallest:
        return min(sizes, default=None)
    return max(sizes, default=None)


def trains_something(model: nn.Module) -> bool:
    """Return whether a model has trainable parameters."""
    return any(parameter.requires_grad for parameter in model.parameters())


def has_parameters(model: nn.Module) -> bool:
    """Return whether a model has parameters, trainable or not."""
    return any(True for _ in model.parameters())


def check_storage(model: nn.Module) -> None:
    """Check that parameters are contiguous, because DeepSpeed broadcasts them as bytes.

    Raises:
        PrepareError: a parameter is not contiguous, for example in a model in channels_last.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise PrepareError(
                f"{name!r} of {type(model).__name__} is not contiguous (channels_last?), but "
                "DeepSpeed only supports contiguous parameters. Call "
                "model.to(memory_format=torch.contiguous_format), or use the backend ddp."
            )


def make_engine(
    accelerator: AcceleratorView,
    deepspeed: Any,
    plugin: DeepSpeedPlugin,
    job: Job,
    run: automatic.RunSizes,
    groups: Any = None,
) -> Any:
    """Create the engine of one model, and put it, its optimizer and its schedulers into the plan."""
    config = HfDeepSpeedConfig(plugin.hf_ds_config)
    config.provenance = dict(plugin.hf_ds_config.provenance)
    model: nn.Module = job.model.value
    optimizer = job.optimizer.value if job.optimizer is not None else None
    trains = trains_something(model) and not job.model.evaluation_mode
    if optimizer is None and config.has("optimizer") and not trains:
        config.del_config_sub_tree("optimizer")
    scheduler = job.schedulers[0].value if job.schedulers else None
    automatic.resolve_batches(config, run)
    automatic.resolve_sizes(config, model)
    automatic.resolve_optimizer(
        config, optimizer, scheduler, run.data_ranks, accelerator.split_batches
    )
    automatic.resolve_engine(config, optimizer is not None)
    automatic.resolve_rest(config)
    plugin.hf_ds_config = config
    _mark_leaves(deepspeed, model, plugin.transformer_moe_cls_names or ())
    given, parameters = optimizer, None
    if isinstance(optimizer, DummyOptim):
        given, parameters = optimizer.optimizer_callable, optimizer.params
    elif optimizer is not None:
        given = for_offload(config, optimizer)
    elif config.has("optimizer"):
        parameters = [p for p in model.parameters() if p.requires_grad]
    op = needs_build(config) if given is None else None
    if op is not None:
        check_compiler(op)
    try:
        with rank_environment(accelerator), build_note(op):
            engine, _, _, own_scheduler = deepspeed.initialize(
                model=model,
                config=config.config,
                optimizer=given,
                model_parameters=parameters,
                mpu=groups,
                dist_init_required=False,
            )
    except (AssertionError, pydantic.ValidationError) as error:
        raise ConfigurationError(
            f"DeepSpeed rejected the config ({config.origin}): {str(error) or 'no reason given'}"
        ) from error
    sizes = accelerator.parallelism_config
    tensor_parallel = 1 if sizes is None else sizes.size("tp")
    if accelerator.num_processes > 1 and tensor_parallel == 1:
        # DeepSpeed broadcasts parameters, but not buffers.
        for buffer in model.buffers():
            if not buffer.is_meta:
                torch.distributed.broadcast(buffer.detach(), src=0)
    _fix_half_precision(engine, not config.is_false("fp16.auto_cast"), accelerator.upcast_outputs)
    job.model.value = engine
    if job.optimizer is not None:
        job.optimizer.value = accelerator.wrap_optimizer(engine.optimizer)
    optimizers = [job.optimizer.value] if job.optimizer is not None else []
    for entry in job.schedulers:
        scheduler = entry.value
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            scheduler = scheduler.lr_scheduler_callable(engine.basic_optimizer)
        elif isinstance(scheduler, DummyScheduler):
            if accelerator.scheduler_steps == "per_process":
                raise ConfigurationError(
                    "scheduler_steps='per_process' is only supported for torch's schedulers. The "
                    "scheduler of a DeepSpeed config, which DummyScheduler represents, counts "
                    "optimizer steps. Leave scheduler_steps out."
                )
            # The training loop steps the scheduler, not the engine.
            scheduler = own_scheduler
            engine.lr_scheduler = None
        entry.value = accelerator.wrap_scheduler(scheduler, optimizers)
    return engine


def _mark_leaves(deepspeed: Any, model: nn.Module, names: Collection[str]) -> None:
    """Make stage 3 gather modules of these classes, such as experts, as a whole."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in classes:
            raise ConfigurationError(
                f"transformer_moe_cls_names has {name!r}, but {type(model).__name__} has no module "
                f"of that class. Its classes are {listing(sorted(classes))}."
                f"{did_you_mean(name, classes)}"
            )
    if names:
        deepspeed.utils.set_z3_leaf_modules(model, [classes[name] for name in names])


# --- DeepSpeed's own half precision -------------------------------------------------------------


def _fix_half_precision(engine: Any, cast_inputs: bool, upcast: bool) -> None:
    """Convert a module's floating-point inputs to its dtype, and outputs to fp32.

    This uses hooks of the module, so that it works if either the engine or the module is called.

    Args:
        cast_inputs: whether to convert inputs.
        upcast: whether to convert outputs.
    """
    fp16 = engine.fp16_enabled()
    if not fp16 and not engine.bfloat16_enabled():
        return
    if engine.zero_optimization_stage() == 0:
        # DeepSpeed has already taken a step with zero gradients. The module has not changed yet, but
        # the fp32 weights have decayed, and the step counts for Adam's bias correction.
        engine.optimizer.refresh_fp32_params()
        engine.basic_optimizer.state.clear()
    if fp16:
        # DeepSpeed's own conversion ignores keyword arguments and fails for named tuples.
        engine._config.float16_config.auto_cast = False
    if cast_inputs:
        cast = partial(_cast, torch.float16 if fp16 else torch.bfloat16)
        engine.module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    if upcast:
        engine.module.register_forward_hook(_upcast)


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:  # saves eight calls
        (alone,) = args
        return (alone.to(dtype) if alone.is_floating_point() else alone,), kwargs

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return map_tensors(cast, args), map_tensors(cast, kwargs) if kwargs else kwargs


def _upcast(module: nn.Module, args: Any, output: Any) -> Any:
    if type(output) is torch.Tensor:
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return convert_to_fp32(output)
