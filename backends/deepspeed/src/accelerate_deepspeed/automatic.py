"""From fields, config and the run to the config DeepSpeed gets: every "auto" resolved, with why.

Nothing here imports deepspeed, so that a config can be shown and checked where it is not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_core.plugin import ConfigurationError, GradScalerKwargs, origin_of
from accelerate_deepspeed.config import AUTO, HfDeepSpeedConfig
from accelerate_deepspeed.optimizers import DummyOptim, DummyScheduler
from accelerate_deepspeed.settings import DeepSpeedPlugin

#: Field of the plugin -> name in the config, and what "auto" means where the field says nothing:
#: None removes the key, AUTO leaves it to `prepare`.
_FIELDS: dict[str, tuple[str, Any]] = {
    "zero_stage": ("zero_optimization.stage", 2),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", AUTO),
    "gradient_clipping": ("gradient_clipping", 0.0),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("zero_optimization.offload_param.device", "none"),
    "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", None),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", None),
    "zero3_save_16bit_model": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save", False
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RunSizes:
    """The numbers of a run that batch sizes follow from.

    Attributes:
        data_ranks: ranks with different samples.
        all_ranks: all ranks: DeepSpeed counts those of one tensor parallel group singly.
        accumulation: micro-batches per optimizer step.
        micro_batch: samples per rank and forward; None if no loader says.
    """

    data_ranks: int
    all_ranks: int
    accumulation: int
    accumulation_origin: str = "the Accelerator"
    micro_batch: int | None = None


def resolve_fields(plugin: DeepSpeedPlugin) -> None:
    """Put the plugin's fields into its config, which must not say something else."""
    config: HfDeepSpeedConfig = plugin.hf_ds_config
    bare = not config.config
    for field, (name, default) in _FIELDS.items():
        value = getattr(plugin, field)
        if value in (None, AUTO):
            if config.is_auto(name) and default is None:
                config.del_config_sub_tree(name)
            elif config.is_auto(name) and default != AUTO:
                config.set_value(name, default, f"default of {field}")
        elif config.has(name) and not config.is_auto(name):
            there = config.get_value(name)
            if not _same(value, there):
                raise ConfigurationError(
                    f"{field}={value!r} (from {origin_of(plugin, field)}) contradicts "
                    f"{name}={there!r} (of {config.origin}). Remove one of them, or write "
                    '"auto" in the config.'
                )
        elif config.has(name) or value != "none":
            config.set_value(name, value, f"{field} from {origin_of(plugin, field)}")
    if not config.has("gradient_clipping"):
        # DeepSpeed's own default is 1.0, which no loop asked for.
        config.set_value("gradient_clipping", 0.0, "the loop clips, or nobody")
    if bare and not config.has("zero_optimization.stage"):
        config.set_value("zero_optimization.stage", 2, "default of zero_stage")
    config.choices("zero_optimization.stage", (0, 1, 2, 3))
    for field in ("zero_stage", "offload_optimizer_device", "offload_param_device"):
        # What the config says is to be seen in the plugin, too.
        name, _ = _FIELDS[field]
        if getattr(plugin, field) is None and config.has(name):
            setattr(plugin, field, config.get_value(name))
    accumulation_of(config)
    limit = config.get_value("gradient_clipping")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ConfigurationError(
            f"{config.shown('gradient_clipping')} takes a number of at least 0."
        )
    _check_offload(config)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return bool(one) == bool(other)
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return str(one) == str(other)


def _check_offload(config: HfDeepSpeedConfig) -> None:
    for kind in ("optimizer", "param"):
        section = f"zero_optimization.offload_{kind}"
        name = f"{section}.device"
        config.choices(name, ("none", "cpu", "nvme"))
        device = config.get_value(name, "none")
        if device in (None, "none"):
            continue
        least = 3 if kind == "param" or device == "nvme" else 1
        if config.stage < least:
            raise ConfigurationError(
                f"{config.shown(name)} needs ZeRO stage {'3' if least == 3 else '1, 2 or 3'}; the "
                f"stage is {config.stage} ({config.where('zero_optimization.stage')})."
            )
        if device == "nvme":
            path = config.get_value(f"{section}.nvme_path")
            shown = f"{section}.nvme_path={path!r} (offload_{kind}_nvme_path)"
            if path in (None, ""):
                raise ConfigurationError(f"{shown}: offload needs a directory on a fast disk.")
            if not Path(path).is_dir():
                raise ConfigurationError(f"{shown} is no directory; make it first.")
            if not os.access(path, os.W_OK):
                raise ConfigurationError(f"{shown} cannot be written to.")


def accumulation_of(config: HfDeepSpeedConfig) -> int | None:
    """Return the accumulation steps that fields or config state, None for none."""
    return _whole(config, "gradient_accumulation_steps")


def check_accumulation(config: HfDeepSpeedConfig, steps: Any) -> int | None:
    """Return what `accumulation_of` does; `steps`, the run's with their origin, must agree.

    A `GradientAccumulationPlugin` of one step is of a loop that says itself when gradients are
    synchronised, as Transformers' Trainer does: the config's number is for its batch sizes.
    """
    there = accumulation_of(config)
    given = steps.origin not in ("default", "backend deepspeed")
    if steps.value == 1 and steps.origin.endswith("gradient_accumulation_plugin"):
        return there
    if there is not None and given and steps.value != there:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps.value} (from {steps.origin}) contradicts {there} "
            f"({config.where('gradient_accumulation_steps')}). Remove one of them, or write "
            '"auto" in the config.'
        )
    return there


# --- precision ------------------------------------------------------------------------------------

_PRECISIONS = {"fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def own_precision(config: HfDeepSpeedConfig) -> tuple[str, str] | None:
    """Return the precision a config switches on, and where; None if it leaves that to the run."""
    sections = ("fp16", "bf16", "bfloat16")
    names = {f"{section}.enabled": _PRECISIONS[section] for section in sections}
    found = {name: precision for name, precision in names.items() if config.is_true(name)}
    if config.is_true("torch_autocast.enabled"):
        dtype = str(config.get_value("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        if dtype not in _PRECISIONS:
            raise ConfigurationError(
                f"torch_autocast.dtype={dtype!r} of {config.origin} is none of bfloat16 and float16."
            )
        found["torch_autocast.enabled"] = _PRECISIONS[dtype]
    if len(found) > 1:
        raise ConfigurationError(
            f"{' and '.join(found)} are both on in {config.origin}; switch one of them on."
        )
    return next(((precision, name) for name, precision in found.items()), None)


def resolve_precision(
    config: HfDeepSpeedConfig, wanted: str, origin: str, scaling: GradScalerKwargs | None = None
) -> bool:
    """Resolve precision; return whether DeepSpeed does it, and the core does not.

    `bf16` is torch's autocast over fp32 parameters, as of every other backend, and the core's. A
    config may switch on DeepSpeed's own bf16 (half precision parameters over an fp32 copy) or its
    `torch_autocast`. `fp16` is DeepSpeed's own.

    Args:
        scaling: how the user wants losses scaled, None if nothing was said.
    """
    own = own_precision(config)
    asked = own is not None
    if own is not None and own[0] != wanted:
        raise ConfigurationError(
            f"mixed_precision={wanted!r} (from {origin}) contradicts {own[1]} of {config.origin}, "
            f"which is {own[0]}. Leave one of them out."
        )
    name = "fp16.enabled"
    if wanted == "fp16" and own is None:
        if config.is_false(name):
            raise ConfigurationError(
                f"mixed_precision='fp16' (from {origin}) contradicts {name}=false of "
                f"{config.origin}. Leave one of them out."
            )
        config.set_value(name, True, f"mixed_precision='fp16' from {origin}")
        own = ("fp16", name)
    for section in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        if config.is_auto(f"{section}.enabled"):
            text = f"mixed_precision={wanted!r} from {origin}"
            if section != "fp16" and wanted == "bf16":
                text += ", which is torch's autocast of the core; true asks for DeepSpeed's own"
            config.set_value(f"{section}.enabled", False, text)
    if own is None:
        return False
    if own == ("fp16", "torch_autocast.enabled"):
        raise ConfigurationError(
            "torch_autocast with float16 clips gradients that are still scaled. Use the section "
            "fp16 (mixed_precision='fp16'), or bfloat16."
        )
    if own[1] == name:
        _resolve_scale(config, scaling, asked)
    return True


def _resolve_scale(
    config: HfDeepSpeedConfig, scaling: GradScalerKwargs | None, asked: bool
) -> None:
    """Put how the loss is scaled into the section fp16.

    Args:
        asked: the config itself has switched fp16 on. What it leaves out is then DeepSpeed's
            default; else it is as with the core's scaler, which comes down at each overflow.
    """
    wanted = scaling or GradScalerKwargs()
    given = wanted.to_kwargs()
    for field, only in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        if given.get(field, only) != only:
            raise ConfigurationError(
                f"GradScalerKwargs({field}={given[field]}) is not possible with DeepSpeed, whose "
                f"loss scale grows and falls by a factor of 2: {field} is {only}."
            )
    power = math.log2(wanted.init_scale)
    if power < 0 or not power.is_integer():
        raise ConfigurationError(
            f"GradScalerKwargs(init_scale={wanted.init_scale}) is not possible with DeepSpeed, "
            "whose first loss scale is a power of 2, and 1 at least."
        )
    settings: dict[str, tuple[Any, str]] = {
        "initial_scale_power": (int(power), "init_scale"),
        "loss_scale_window": (wanted.growth_interval, "growth_interval"),
        "hysteresis": (1, ""),
        "loss_scale": (0 if wanted.enabled else 1, "enabled"),
    }
    static = config.get_value("fp16.loss_scale")
    if static not in (None, AUTO, 0) and given.keys() & {"init_scale", "growth_interval"}:
        raise ConfigurationError(
            f"GradScalerKwargs({', '.join(sorted(given))}) contradicts the static scale "
            f"{config.shown('fp16.loss_scale')}. Remove one of them."
        )
    for key, (value, field) in settings.items():
        name = f"fp16.{key}"
        there = config.get_value(name, AUTO)
        if there != AUTO and field in given and not _same(value, there):
            raise ConfigurationError(
                f"GradScalerKwargs({field}={given[field]}) contradicts {config.shown(name)}. "
                'Remove one of them, or write "auto" in the config.'
            )
        if config.is_auto(name) or (not config.has(name) and (field in given or not asked)):
            why = f"{field} of GradScalerKwargs" if field in given else "as the core's scaler"
            config.set_value(name, value, why)
    if config.is_auto("fp16.auto_cast"):
        config.set_value("fp16.auto_cast", True, "inputs are cast unless it is false")


# --- batches --------------------------------------------------------------------------------------


def resolve_batches(config: HfDeepSpeedConfig, run: RunSizes) -> None:
    """Resolve the three batch sizes, of which each follows from the other two."""
    micro_name, total_name = "train_micro_batch_size_per_gpu", "train_batch_size"
    micro, total = (_whole(config, name) for name in (micro_name, total_name))
    config.set_value("gradient_accumulation_steps", run.accumulation, run.accumulation_origin)
    each = run.accumulation * run.data_ranks
    steps = f"{run.accumulation} accumulation steps ({run.accumulation_origin}) x {run.data_ranks} ranks"
    if micro is None:
        micro, why = run.micro_batch, "the loader's batch size"
        if micro is None and total is not None:
            if total % each:
                raise ConfigurationError(f"{config.shown(total_name)} is no multiple of {steps}.")
            micro, why = total // each, f"{total_name} / steps / ranks"
        elif micro is None:
            micro, why = 1, "no loader was prepared with it"
        config.set_value(micro_name, micro, why)
    if total not in (None, micro * each):
        raise ConfigurationError(
            f"{config.shown(total_name)} is not {config.shown(micro_name)} x {steps} = "
            f'{micro * each}. Write "auto" for {total_name}.'
        )
    why = config.where(total_name) if total is not None else "micro-batch x steps x ranks"
    config.set_value(total_name, micro * run.accumulation * run.all_ranks, why)


def _whole(config: HfDeepSpeedConfig, name: str) -> int | None:
    value = config.get_value(name)
    if value in (None, AUTO):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{config.shown(name)} takes a whole number of at least 1.")
    return value


# --- what follows from the model, the optimizer and the scheduler ---------------------------------


def resolve_sizes(config: HfDeepSpeedConfig, model: Any) -> None:
    """Resolve the bucket sizes of stage 3 by the model's hidden size."""
    hidden = hidden_size(model)
    square = hidden * hidden if hidden is not None else 0
    for key, size in (
        ("reduce_bucket_size", square),
        ("stage3_prefetch_bucket_size", int(0.9 * square)),
        ("stage3_param_persistence_threshold", 10 * (hidden or 0)),
    ):
        name = f"zero_optimization.{key}"
        if config.is_auto(name) and hidden is None:
            config.del_config_sub_tree(name)
            config.provenance[name] = "left to DeepSpeed: the model's config has no hidden_size"
        elif config.is_auto(name):
            config.set_value(name, size, f"from the model's hidden size of {hidden}")


def hidden_size(model: Any) -> int | None:
    """Return `hidden_size` of a model's config, the largest of `hidden_sizes`, else None."""
    config = getattr(model, "config", None)
    for one in (config, getattr(config, "text_config", None)):
        size, sizes = getattr(one, "hidden_size", None), getattr(one, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if isinstance(sizes, Sequence) and sizes:
            return int(max(sizes))
    return None


def resolve_optimizer(
    config: HfDeepSpeedConfig, optimizer: Any, scheduler: Any, data_ranks: int, split: bool
) -> None:
    """Resolve the sections `optimizer` and `scheduler` by their stand-ins.

    Args:
        data_ranks: by how many a stand-in's numbers of steps are divided, unless batches are
            split among the ranks.
    """
    dummy = optimizer if isinstance(optimizer, DummyOptim) else None
    makes = dummy is not None and dummy.optimizer_callable is not None
    if config.has("optimizer"):
        if optimizer is not None and dummy is None:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, and prepare got a "
                f"{type(optimizer).__name__}, too: remove one, or prepare DummyOptim(parameters)."
            )
        if makes:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, and DummyOptim an optimizer_callable, too: "
                "remove one."
            )
        known: dict[str, Any] = {}
        if dummy is not None:
            known = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
        _fill(config, "optimizer", known, "DummyOptim")
    elif dummy is not None and not makes:
        raise ConfigurationError(
            f"DummyOptim stands for the optimizer of a DeepSpeed config, and {config.origin} has "
            "none: add the section, or prepare a torch optimizer."
        )
    if dummy is None:
        there = getattr(optimizer, "defaults", {}).get("lr")
        lr = config.get_value("optimizer.params.lr", there)
    else:
        lr = dummy.lr
    _resolve_scheduler(config, scheduler, lr, 1 if split else data_ranks)


def _resolve_scheduler(config: HfDeepSpeedConfig, scheduler: Any, lr: Any, parts: int) -> None:
    dummy = scheduler if isinstance(scheduler, DummyScheduler) else None
    makes = dummy is not None and dummy.lr_scheduler_callable is not None
    if config.has("scheduler"):
        if (scheduler is not None and dummy is None) or makes:
            raise ConfigurationError(
                f"{config.origin} has a scheduler, and prepare got one, too: remove one, or "
                "prepare DummyScheduler(optimizer)."
            )
        known = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "cycle_max_lr": lr}
        if dummy is not None:
            known |= dummy.kwargs
            # DeepSpeed takes 2 for 1, and refuses 0.
            known["warmup_num_steps"] = max(1, math.ceil(dummy.warmup_num_steps / parts))
            if dummy.total_num_steps is not None:
                known["total_num_steps"] = math.ceil(dummy.total_num_steps / parts)
        _fill(config, "scheduler", known, "DummyScheduler")
    elif dummy is not None and not makes:
        raise ConfigurationError(
            f"DummyScheduler stands for the scheduler of a DeepSpeed config, and {config.origin} "
            "has none: add the section, give lr_scheduler_callable, or prepare a torch scheduler."
        )


def _fill(config: HfDeepSpeedConfig, section: str, known: dict[str, Any], by: str) -> None:
    for key, value in (config.get_value(f"{section}.params") or {}).items():
        name = f"{section}.params.{key}"
        if value == AUTO and known.get(key) is None:
            raise ConfigurationError(
                f'{name} is "auto" in {config.origin}, and no {by} says what it is: write a value.'
            )
        if value == AUTO:
            config.set_value(name, known[key], by)


#: Values of DeepSpeed's own for which "auto" is a meaning.
_ITS_OWN = ("data_types.", "expert_parallel.", "elasticity.", "autotuning.", "tensor_parallel.")


def resolve_rest(config: HfDeepSpeedConfig) -> None:
    """Refuse what is still "auto"."""
    for name in config.autos():
        if not name.startswith(_ITS_OWN):
            raise ConfigurationError(
                f'{name} is "auto" in {config.origin}, and nothing says what it is: write a value.'
            )


def resolve_engine(config: HfDeepSpeedConfig, prepared: bool) -> None:
    """Set what this backend needs of the engine: its `step()` is the boundary."""
    name = "managed_gradient_accumulation"
    if config.is_true(name):
        raise ConfigurationError(
            f"{config.shown(name)} lets DeepSpeed count micro-batches; here the loop says when to "
            "step. Leave it out."
        )
    config.set_value(name, False, "the loop says when to step")
    overlap = "zero_optimization.overlap_comm"
    if config.stage == 1 and config.is_true(overlap):
        raise ConfigurationError(
            f"{config.shown(overlap)} cannot be with stage 1 and a loop that says when to step; "
            "use stage 2, or leave it out."
        )
    if prepared and not config.has("zero_allow_untested_optimizer"):
        config.set_value("zero_allow_untested_optimizer", True, "an optimizer was prepared")
    if not config.has("steps_per_print"):
        config.set_value("steps_per_print", 2**31, "progress is the loop's to print")
