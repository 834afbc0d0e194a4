"""Resolve each "auto" in DeepSpeed's config, from fields, settings and the run, and record why.

This module doesn't import deepspeed, so configs can be shown and checked without it.
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

#: Field of the plugin -> name in the config, and the value for "auto" if the field is not set. None
#: removes the key, and AUTO leaves it to `prepare`.
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
    """The numbers of a run that determine batch sizes.

    Attributes:
        data_ranks: number of ranks that read different samples.
        all_ranks: number of ranks that DeepSpeed counts, including each tensor parallel rank.
        accumulation: micro-batches per optimizer step.
        accumulation_origin: where that number comes from.
        micro_batch: samples per rank and forward, or None if no loader determines it.
    """

    data_ranks: int
    all_ranks: int
    accumulation: int
    accumulation_origin: str = "the Accelerator"
    micro_batch: int | None = None


def resolve_fields(plugin: DeepSpeedPlugin) -> None:
    """Copy the plugin's fields into its config.

    Raises:
        ConfigurationError: a field contradicts the config, or a value is invalid.
    """
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
                    f"{name}={there!r} (in {config.origin}). Remove one of them, or write "
                    '"auto" in the config.'
                )
        elif config.has(name) or value != "none":
            config.set_value(name, value, f"{field} from {origin_of(plugin, field)}")
    if not config.has("gradient_clipping"):
        # DeepSpeed's own default is 1.0, which would clip without a request.
        config.set_value("gradient_clipping", 0.0, "only clip_grad_norm_ clips")
    if bare and not config.has("zero_optimization.stage"):
        config.set_value("zero_optimization.stage", 2, "default of zero_stage")
    config.choices("zero_optimization.stage", (0, 1, 2, 3))
    for field in ("zero_stage", "offload_optimizer_device", "offload_param_device"):
        # Make the config's value visible in the plugin's field.
        name, _ = _FIELDS[field]
        if getattr(plugin, field) is None and config.has(name):
            setattr(plugin, field, config.get_value(name))
    accumulation_of(config)
    limit = config.get_value("gradient_clipping")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ConfigurationError(
            f"{config.shown('gradient_clipping')} must be a number of at least 0."
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
                f"{config.shown(name)} needs ZeRO stage {'3' if least == 3 else '1, 2 or 3'}, but "
                f"the stage is {config.stage} ({config.where('zero_optimization.stage')})."
            )
        if device == "nvme":
            path = config.get_value(f"{section}.nvme_path")
            shown = f"{section}.nvme_path={path!r} (offload_{kind}_nvme_path)"
            if path in (None, ""):
                raise ConfigurationError(
                    f"{shown}: offload to nvme needs a directory on a fast disk. Set it."
                )
            if not Path(path).is_dir():
                raise ConfigurationError(f"{shown} is not a directory. Create it first.")
            if not os.access(path, os.W_OK):
                raise ConfigurationError(
                    f"{shown} is not writable. Change its permissions, or choose another directory."
                )


def accumulation_of(config: HfDeepSpeedConfig) -> int | None:
    """Return the accumulation steps from fields or config, or None if they are not set."""
    return _whole(config, "gradient_accumulation_steps")


def check_accumulation(config: HfDeepSpeedConfig, steps: Any) -> int | None:
    """Return the accumulation steps of the config, after comparing them with the run's.

    A `GradientAccumulationPlugin` with one step is not compared. It is used by loops that control
    synchronisation themselves, such as Transformers' Trainer, for which the number in the config
    only determines batch sizes.

    Args:
        steps: the run's accumulation steps, with their origin.

    Raises:
        ConfigurationError: the numbers differ.
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
    """Return the precision that a config turns on, and the name of the setting, or None."""
    sections = ("fp16", "bf16", "bfloat16")
    names = {f"{section}.enabled": _PRECISIONS[section] for section in sections}
    found = {name: precision for name, precision in names.items() if config.is_true(name)}
    if config.is_true("torch_autocast.enabled"):
        dtype = str(config.get_value("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        if dtype not in _PRECISIONS:
            raise ConfigurationError(
                f"torch_autocast.dtype={dtype!r} in {config.origin} must be bfloat16 or float16."
            )
        found["torch_autocast.enabled"] = _PRECISIONS[dtype]
    if len(found) > 1:
        raise ConfigurationError(
            f"{' and '.join(found)} are both true in {config.origin}. Turn on only one of them."
        )
    return next(((precision, name) for name, precision in found.items()), None)


def resolve_precision(
    config: HfDeepSpeedConfig, wanted: str, origin: str, scaling: GradScalerKwargs | None = None
) -> bool:
    """Resolve the precision, and return whether DeepSpeed handles it instead of the core.

    By default, `bf16` is the core's: torch's autocast with fp32 parameters, as with other backends.
    A config can turn on DeepSpeed's own bf16 (half precision parameters and an fp32 copy) or its
    `torch_autocast` instead. `fp16` is always DeepSpeed's own.

    Args:
        scaling: the user's options for loss scaling, or None.
    """
    own = own_precision(config)
    asked = own is not None
    if own is not None and own[0] != wanted:
        raise ConfigurationError(
            f"mixed_precision={wanted!r} (from {origin}) contradicts {own[1]}=true in "
            f"{config.origin}, which means {own[0]}. Leave one of them out."
        )
    name = "fp16.enabled"
    if wanted == "fp16" and own is None:
        if config.is_false(name):
            raise ConfigurationError(
                f"mixed_precision='fp16' (from {origin}) contradicts {name}=false in "
                f"{config.origin}. Leave one of them out."
            )
        config.set_value(name, True, f"mixed_precision='fp16' from {origin}")
        own = ("fp16", name)
    for section in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        if config.is_auto(f"{section}.enabled"):
            text = f"mixed_precision={wanted!r} from {origin}"
            if section != "fp16" and wanted == "bf16":
                text += ", which uses the core's autocast (true uses DeepSpeed's own bf16)"
            config.set_value(f"{section}.enabled", False, text)
    if own is None:
        return False
    if own == ("fp16", "torch_autocast.enabled"):
        raise ConfigurationError(
            "torch_autocast with float16 is not supported, because DeepSpeed would clip gradients "
            "that are still scaled. Use the section fp16 (mixed_precision='fp16') or the dtype "
            "bfloat16."
        )
    if own[1] == name:
        _resolve_scale(config, scaling, asked)
    return True


def _resolve_scale(
    config: HfDeepSpeedConfig, scaling: GradScalerKwargs | None, asked: bool
) -> None:
    """Fill in the options for loss scaling in the section fp16.

    Args:
        asked: whether the config itself turned on fp16. Missing options then have DeepSpeed's
            defaults. Otherwise they match the core's scaler, which backs off at each overflow.
    """
    wanted = scaling or GradScalerKwargs()
    given = wanted.to_kwargs()
    for field, only in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        if given.get(field, only) != only:
            raise ConfigurationError(
                f"GradScalerKwargs({field}={given[field]}) is not supported with DeepSpeed, which "
                f"changes the loss scale by a factor of 2. The only valid value is {only}."
            )
    power = math.log2(wanted.init_scale)
    if power < 0 or not power.is_integer():
        raise ConfigurationError(
            f"GradScalerKwargs(init_scale={wanted.init_scale}) is not supported with DeepSpeed. The "
            "initial loss scale must be a power of 2, and at least 1."
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
            why = (
                f"{field} of GradScalerKwargs" if field in given else "default of the core's scaler"
            )
            config.set_value(name, value, why)
    if config.is_auto("fp16.auto_cast"):
        config.set_value("fp16.auto_cast", True, "inputs are cast by default")


# --- batches --------------------------------------------------------------------------------------


def resolve_batches(config: HfDeepSpeedConfig, run: RunSizes) -> None:
    """Resolve the three batch sizes. Each is determined by the other two."""
    micro_name, total_name = "train_micro_batch_size_per_gpu", "train_batch_size"
    micro, total = (_whole(config, name) for name in (micro_name, total_name))
    config.set_value("gradient_accumulation_steps", run.accumulation, run.accumulation_origin)
    each = run.accumulation * run.data_ranks
    steps = f"{run.accumulation} accumulation steps ({run.accumulation_origin}) x {run.data_ranks} ranks"
    if micro is None:
        micro, why = run.micro_batch, "the loader's batch size"
        if micro is None and total is not None:
            if total % each:
                raise ConfigurationError(
                    f"{config.shown(total_name)} is not divisible by {each} = {steps}. Change "
                    f"{total_name}."
                )
            micro, why = total // each, f"{total_name} / steps / ranks"
        elif micro is None:
            micro, why = 1, "no loader was prepared in the same call"
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
        raise ConfigurationError(f"{config.shown(name)} must be an integer of at least 1.")
    return value


# --- values derived from the model, the optimizer and the scheduler -------------------------------


def resolve_sizes(config: HfDeepSpeedConfig, model: Any) -> None:
    """Resolve the bucket sizes of stage 3 from the model's hidden size."""
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
            config.provenance[name] = (
                "DeepSpeed's default, because the model's config has no hidden_size"
            )
        elif config.is_auto(name):
            config.set_value(name, size, f"from the model's hidden size, {hidden}")


def hidden_size(model: Any) -> int | None:
    """Return `hidden_size` from a model's config, or the largest of `hidden_sizes`, or None."""
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
    """Resolve the sections `optimizer` and `scheduler` from `DummyOptim` and `DummyScheduler`.

    Args:
        data_ranks: the numbers of steps in `DummyScheduler` are divided by this, unless `split`.
        split: whether batches are split across ranks.
    """
    dummy = optimizer if isinstance(optimizer, DummyOptim) else None
    makes = dummy is not None and dummy.optimizer_callable is not None
    if config.has("optimizer"):
        if optimizer is not None and dummy is None:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, but prepare also received a "
                f"{type(optimizer).__name__}. Remove one of them, or prepare DummyOptim(parameters)."
            )
        if makes:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, but DummyOptim also has an optimizer_callable. "
                "Remove one of them."
            )
        known: dict[str, Any] = {}
        if dummy is not None:
            known = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
        _fill(config, "optimizer", known, "DummyOptim")
    elif dummy is not None and not makes:
        raise ConfigurationError(
            "DummyOptim is a placeholder for the optimizer in a DeepSpeed config, but "
            f"{config.origin} has no section optimizer. Add one, or prepare a torch optimizer."
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
                f"{config.origin} has a scheduler, but prepare also received one. Remove one of "
                "them, or prepare DummyScheduler(optimizer)."
            )
        known = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "cycle_max_lr": lr}
        if dummy is not None:
            known |= dummy.kwargs
            # DeepSpeed replaces 1 by 2, and rejects 0.
            known["warmup_num_steps"] = max(1, math.ceil(dummy.warmup_num_steps / parts))
            if dummy.total_num_steps is not None:
                known["total_num_steps"] = math.ceil(dummy.total_num_steps / parts)
        _fill(config, "scheduler", known, "DummyScheduler")
    elif dummy is not None and not makes:
        raise ConfigurationError(
            "DummyScheduler is a placeholder for the scheduler in a DeepSpeed config, but "
            f"{config.origin} has no section scheduler. Add one, pass lr_scheduler_callable, or "
            "prepare a torch scheduler."
        )


def _fill(config: HfDeepSpeedConfig, section: str, known: dict[str, Any], by: str) -> None:
    for key, value in (config.get_value(f"{section}.params") or {}).items():
        name = f"{section}.params.{key}"
        if value == AUTO and known.get(key) is None:
            raise ConfigurationError(
                f'{name} is "auto" in {config.origin}, but there is no {by} with a value for it. '
                "Write a value into the config."
            )
        if value == AUTO:
            config.set_value(name, known[key], by)


#: Prefixes of settings for which DeepSpeed itself supports "auto".
_ITS_OWN = ("data_types.", "expert_parallel.", "elasticity.", "autotuning.", "tensor_parallel.")


def resolve_rest(config: HfDeepSpeedConfig) -> None:
    """Check that no value is still "auto".

    Raises:
        ConfigurationError: there is one, which DeepSpeed does not support.
    """
    for name in config.autos():
        if not name.startswith(_ITS_OWN):
            raise ConfigurationError(
                f'{name} is "auto" in {config.origin}, but it cannot be derived from the run. Write '
                "a value into the config."
            )


def resolve_engine(config: HfDeepSpeedConfig, prepared: bool) -> None:
    """Set the options that this backend needs, so that `step()` ends an accumulation cycle."""
    name = "managed_gradient_accumulation"
    if config.is_true(name):
        raise ConfigurationError(
            f"{config.shown(name)} is not supported. It makes DeepSpeed count micro-batches, but "
            "here the training loop determines when to step. Leave it out."
        )
    config.set_value(name, False, "the training loop determines when to step")
    overlap = "zero_optimization.overlap_comm"
    if config.stage == 1 and config.is_true(overlap):
        raise ConfigurationError(
            f"{config.shown(overlap)} is not supported with stage 1, because the training loop "
            "determines when to step. Use stage 2, or leave it out."
        )
    if prepared and not config.has("zero_allow_untested_optimizer"):
        config.set_value("zero_allow_untested_optimizer", True, "an optimizer was prepared")
    if not config.has("steps_per_print"):
        config.set_value("steps_per_print", 2**31, "the training loop prints progress")
