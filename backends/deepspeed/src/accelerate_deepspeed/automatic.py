"""From fields, config and the run to the config DeepSpeed gets: every "auto" resolved, with why.

Nothing here imports deepspeed, so that a config can be shown and checked where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate_core import GradScalerKwargs, origin_of
from accelerate_core.errors import ConfigurationError
from accelerate_deepspeed.config import AUTO, HfDeepSpeedConfig
from accelerate_deepspeed.dummies import DummyOptim, DummyScheduler
from accelerate_deepspeed.settings import DeepSpeedPlugin, check_nvme

__all__ = [
    "Run",
    "accumulation_of",
    "own_precision",
    "settle_batches",
    "settle_fields",
    "settle_optimizer",
    "settle_precision",
    "settle_rest",
    "settle_sizes",
]

_OFFLOAD = "zero_optimization.offload_"
#: Field of the plugin -> name in the config.
_NAMES = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{_OFFLOAD}optimizer.device",
    "offload_param_device": f"{_OFFLOAD}param.device",
    "offload_optimizer_nvme_path": f"{_OFFLOAD}optimizer.nvme_path",
    "offload_param_nvme_path": f"{_OFFLOAD}param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
#: What "auto" means where no field says anything; None removes the key.
_DEFAULTS: dict[str, Any] = {
    "zero_stage": 2,
    "gradient_clipping": 0.0,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": None,
    "offload_param_nvme_path": None,
    "zero3_save_16bit_model": False,
}


@dataclass(frozen=True)
class Run:
    """What a config needs to know of a run.

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


def settle_fields(plugin: DeepSpeedPlugin) -> None:
    """Put the plugin's fields into its config.

    Raises:
        ConfigurationError: a field and the config say different things.
    """
    config: HfDeepSpeedConfig = plugin.hf_ds_config
    bare = not config.config
    for field, name in _NAMES.items():
        value = getattr(plugin, field)
        if value is None or value == AUTO:
            continue
        if config.has(name) and not config.is_auto(name):
            there = config.get_value(name)
            if not _same(value, there):
                raise ConfigurationError(
                    f"{field}={value!r} (from {origin_of(plugin, field)}) contradicts "
                    f"{name}={there!r} (of {config.origin}). Remove one of them, or write "
                    '"auto" in the config.'
                )
        elif not (value == "none" and not config.has(name)):
            config.set_value(name, value, f"{field} from {origin_of(plugin, field)}")
    for field, default in _DEFAULTS.items():
        name = _NAMES[field]
        if config.is_auto(name):
            if default is None:
                config.del_config_sub_tree(name)
            else:
                config.set_value(name, default, f"default of {field}")
    if not config.has("gradient_clipping"):
        # DeepSpeed's own default is 1.0, which no loop asked for.
        config.set_value("gradient_clipping", 0.0, "the loop clips, or nobody")
    if bare and not config.has("zero_optimization.stage"):
        config.set_value("zero_optimization.stage", 2, "default of zero_stage")
    config.choices("zero_optimization.stage", (0, 1, 2, 3))
    for field in ("zero_stage", "offload_optimizer_device", "offload_param_device"):
        # What the config says is to be seen in the plugin, too.
        if getattr(plugin, field) is None and config.has(_NAMES[field]):
            setattr(plugin, field, config.get_value(_NAMES[field]))
    _whole(config, "gradient_accumulation_steps")
    limit = config.get_value("gradient_clipping")
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ConfigurationError(
            f"gradient_clipping={limit!r} ({config.where('gradient_clipping')}) takes a number of "
            "at least 0."
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
    for kind, stages in (("optimizer", (1, 2, 3)), ("param", (3,))):
        section = f"{_OFFLOAD}{kind}"
        device = config.get_value(f"{section}.device", "none")
        if device in (None, "none"):
            continue
        config.choices(f"{section}.device", ("none", "cpu", "nvme"))
        if config.stage not in stages:
            needs = "stage 3" if stages == (3,) else "stage 1, 2 or 3"
            raise ConfigurationError(
                f"{section}.device={device!r} ({config.where(section + '.device')}) needs ZeRO "
                f"{needs}; the stage is {config.stage} "
                f"({config.where('zero_optimization.stage')})."
            )
        if device == "nvme":
            if config.stage != 3:
                raise ConfigurationError(
                    f"{section}.device='nvme' ({config.where(section + '.device')}) needs ZeRO "
                    f"stage 3; the stage is {config.stage}."
                )
            check_nvme(config.get_value(f"{section}.nvme_path"), f"{section}.nvme_path")


def accumulation_of(config: HfDeepSpeedConfig) -> int | None:
    """Return the accumulation steps that fields or config state, None for none."""
    return _whole(config, "gradient_accumulation_steps")


# --- precision ------------------------------------------------------------------------------------

_HALF = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_AUTOCAST = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def own_precision(config: HfDeepSpeedConfig) -> tuple[str, str] | None:
    """Return the precision a config switches on, and where; None if it leaves that to the run."""
    found: dict[str, str] = {}
    for section, precision in _HALF.items():
        if config.is_true(f"{section}.enabled"):
            found[f"{section}.enabled"] = precision
    if config.is_true("torch_autocast.enabled"):
        dtype = str(config.get_value("torch_autocast.dtype", "bfloat16")).removeprefix("torch.")
        if dtype not in _AUTOCAST:
            raise ConfigurationError(
                f"torch_autocast.dtype={dtype!r} of {config.origin} is none of bfloat16 and float16."
            )
        found["torch_autocast.enabled"] = _AUTOCAST[dtype]
    if len(found) > 1:
        raise ConfigurationError(
            f"{' and '.join(found)} are both on in {config.origin}; switch one of them on."
        )
    for name, precision in found.items():
        return precision, name
    return None


def settle_precision(
    config: HfDeepSpeedConfig,
    wanted: str,
    origin: str,
    scaling: GradScalerKwargs | None = None,
) -> bool:
    """Resolve precision; return whether DeepSpeed does it, and the core does not.

    `bf16` is torch's autocast over fp32 parameters, as of every other backend, and the core's. A
    config may switch on DeepSpeed's own bf16 (half precision parameters over an fp32 copy) or its
    `torch_autocast`. `fp16` is DeepSpeed's own.

    Args:
        scaling: how the user wants losses scaled, None if nothing was said.

    Raises:
        ConfigurationError: contradictions, and what DeepSpeed gets wrong.
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
        _settle_scale(config, scaling, asked)
    return True


def _settle_scale(config: HfDeepSpeedConfig, scaling: GradScalerKwargs | None, asked: bool) -> None:
    """Put how the loss is scaled into the section fp16.

    Args:
        asked: the config itself has switched fp16 on. What it leaves out is then DeepSpeed's
            default; else it is as with the core's scaler, which comes down at each overflow.
    """
    given = {} if scaling is None else scaling.to_kwargs()
    wanted = scaling or GradScalerKwargs()
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
            f"fp16.loss_scale={static} ({config.where('fp16.loss_scale')}). Remove one of them."
        )
    for key, (value, field) in settings.items():
        name = f"fp16.{key}"
        there = config.get_value(name, AUTO)
        if there != AUTO and field in given and not _same(value, there):
            raise ConfigurationError(
                f"GradScalerKwargs({field}={given[field]}) contradicts {name}={there} "
                f'({config.where(name)}). Remove one of them, or write "auto" in the config.'
            )
        if config.is_auto(name) or (not config.has(name) and (field in given or not asked)):
            why = f"{field} of GradScalerKwargs" if field in given else "as the core's scaler"
            config.set_value(name, value, why)
    if config.is_auto("fp16.auto_cast"):
        config.set_value("fp16.auto_cast", True, "inputs are cast unless it is false")


# --- batches --------------------------------------------------------------------------------------


def settle_batches(config: HfDeepSpeedConfig, run: Run) -> None:
    """Resolve the three batch sizes, of which each follows from the other two.

    Raises:
        ConfigurationError: they contradict each other.
    """
    micro_name, total_name = "train_micro_batch_size_per_gpu", "train_batch_size"
    steps_name = "gradient_accumulation_steps"
    micro, total = (_whole(config, name) for name in (micro_name, total_name))
    config.set_value(steps_name, run.accumulation, run.accumulation_origin)
    each = run.accumulation * run.data_ranks
    if micro is None and total is not None and run.micro_batch is None:
        if total % each:
            raise ConfigurationError(
                f"{total_name}={total} ({config.where(total_name)}) is no multiple of "
                f"{run.accumulation} accumulation steps ({run.accumulation_origin}) x "
                f"{run.data_ranks} ranks."
            )
        micro = total // each
        config.set_value(micro_name, micro, f"{total_name} / steps / ranks")
    elif micro is None:
        micro = run.micro_batch or 1
        why = "the loader's batch size" if run.micro_batch else "no loader was prepared with it"
        config.set_value(micro_name, micro, why)
    if total is not None and total != micro * each:
        raise ConfigurationError(
            f"{total_name}={total} ({config.where(total_name)}) is not {micro_name}={micro} "
            f"({config.where(micro_name)}) x {run.accumulation} accumulation steps "
            f"({run.accumulation_origin}) x {run.data_ranks} ranks = {micro * each}. "
            f'Write "auto" for {total_name}.'
        )
    why = config.where(total_name) if total is not None else "micro-batch x steps x ranks"
    config.set_value(total_name, micro * run.accumulation * run.all_ranks, why)


def _whole(config: HfDeepSpeedConfig, name: str) -> int | None:
    value = config.get_value(name)
    if value in (None, AUTO):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(
            f"{name}={value!r} ({config.where(name)}) takes a whole number of at least 1."
        )
    return value


# --- what follows from the model, the optimizer and the scheduler ---------------------------------


def settle_sizes(config: HfDeepSpeedConfig, model: Any) -> None:
    """Resolve the bucket sizes of stage 3 by the model's hidden size."""
    names: dict[str, Callable[[int], int]] = {
        "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
        "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
    }
    hidden = hidden_size(model)
    for name, size in names.items():
        if not config.is_auto(name):
            continue
        if hidden is None:
            config.del_config_sub_tree(name)
            config.because[name] = "left to DeepSpeed: the model's config has no hidden_size"
        else:
            config.set_value(name, size(hidden), f"from the model's hidden size of {hidden}")


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


def settle_optimizer(
    config: HfDeepSpeedConfig, optimizer: Any, scheduler: Any, data_ranks: int, split: bool
) -> None:
    """Resolve the sections `optimizer` and `scheduler` by their stand-ins.

    Args:
        data_ranks: by how many a stand-in's numbers of steps are divided, unless batches are
            split among the ranks.

    Raises:
        ConfigurationError: two of one kind, or a stand-in for nothing.
    """
    dummy = optimizer if isinstance(optimizer, DummyOptim) else None
    if config.has("optimizer"):
        if optimizer is not None and dummy is None:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, and prepare got a "
                f"{type(optimizer).__name__}, too: remove one, or prepare DummyOptim(parameters)."
            )
        for key, value in (config.get_value("optimizer.params") or {}).items():
            name = f"optimizer.params.{key}"
            if value == AUTO:
                known = {} if dummy is None else {
                    "lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs
                }  # fmt: skip
                _fill(config, name, known.get(key), "DummyOptim")
        if dummy is not None and dummy.optimizer_callable is not None:
            raise ConfigurationError(
                f"{config.origin} has an optimizer, and DummyOptim an optimizer_callable, too: "
                "remove one."
            )
    elif dummy is not None and dummy.optimizer_callable is None:
        raise ConfigurationError(
            f"DummyOptim stands for the optimizer of a DeepSpeed config, and {config.origin} has "
            "none: add the section, or prepare a torch optimizer."
        )
    _settle_scheduler(config, scheduler, dummy, 1 if split else data_ranks)


def _settle_scheduler(
    config: HfDeepSpeedConfig, scheduler: Any, optimizer: DummyOptim | None, parts: int
) -> None:
    dummy = scheduler if isinstance(scheduler, DummyScheduler) else None
    made = dummy is not None and dummy.lr_scheduler_callable is not None
    if config.has("scheduler"):
        if (scheduler is not None and dummy is None) or made:
            raise ConfigurationError(
                f"{config.origin} has a scheduler, and prepare got one, too: remove one, or "
                "prepare DummyScheduler(optimizer)."
            )
        known: dict[str, Any] = {"warmup_min_lr": 0.0}
        lr = config.get_value("optimizer.params.lr") if optimizer is None else optimizer.lr
        known["warmup_max_lr"] = known["cycle_max_lr"] = lr
        if dummy is not None:
            known |= dummy.kwargs
            known["warmup_num_steps"] = math.ceil(dummy.warmup_num_steps / parts)
            if dummy.total_num_steps is not None:
                known["total_num_steps"] = math.ceil(dummy.total_num_steps / parts)
        for key, value in (config.get_value("scheduler.params") or {}).items():
            if value == AUTO:
                _fill(config, f"scheduler.params.{key}", known.get(key), "DummyScheduler")
    elif dummy is not None and not made:
        raise ConfigurationError(
            f"DummyScheduler stands for the scheduler of a DeepSpeed config, and {config.origin} "
            "has none: add the section, give lr_scheduler_callable, or prepare a torch scheduler."
        )


def _fill(config: HfDeepSpeedConfig, name: str, value: Any, by: str) -> None:
    if value is None:
        raise ConfigurationError(
            f'{name} is "auto" in {config.origin}, and no {by} says what it is: write a value.'
        )
    config.set_value(name, value, by)


#: Values of DeepSpeed's own for which "auto" is a meaning.
_ITS_OWN = ("data_types.", "expert_parallel.", "elasticity.", "autotuning.", "tensor_parallel.")


def settle_rest(config: HfDeepSpeedConfig, names: Iterable[str] | None = None) -> None:
    """Refuse what is still "auto".

    Raises:
        ConfigurationError: by name.
    """
    for name in config.autos() if names is None else names:
        if not name.startswith(_ITS_OWN):
            raise ConfigurationError(
                f'{name} is "auto" in {config.origin}, and nothing says what it is: write a value.'
            )
