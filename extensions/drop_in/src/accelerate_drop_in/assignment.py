"""Handle assignments to existing attributes of an Accelerator or a state.

In Accelerate, most attributes are plain ones, so scripts and libraries assign to them. Here, the value
is passed to the part that uses it, or an error says what to do instead. If an assignment has no effect
in Accelerate, it has none here either, and a warning says so. All other names are ordinary attributes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accelerate_core import AutocastKwargs, DataLoaderConfiguration
from accelerate_core.data.rng import check_rng_types
from accelerate_core.distributed import process
from accelerate_core.errors import AssignmentError
from accelerate_core.plugin import (
    ConfigurationError,
    MissingPluginError,
    ProjectConfiguration,
    SourcedValue,
    Sources,
    TorchDynamoPlugin,
    exported,
    resolve_settings,
    warn,
)

Effect = Literal["honoured", "no effect", "refused"]


@dataclass(frozen=True)
class Rule:
    """The effect of an assignment to one attribute.

    Args:
        effect: whether the value is used.
        advice: where it is used, or what to do instead.
        apply: passes the value to the part that uses it.
    """

    effect: Effect
    advice: str
    apply: Callable[[Any, Any], None] | None = None


# --- assignments that have an effect ------------------------------------------------------------


def _expect(name: str, value: Any, kind: type[Any], *, optional: bool = False) -> None:
    if not isinstance(value, kind) and not (optional and value is None):
        or_none = " or None" if optional else ""
        raise AssignmentError(
            f"accelerator.{name} must be a {kind.__name__}{or_none}, not {value!r}."
        )


def _set_ddp_handler(accelerator: Any, value: Any) -> None:
    try:
        from accelerate_ddp import DDPBackend, DistributedDataParallelKwargs
    except ModuleNotFoundError as error:
        raise MissingPluginError(str(exported("DistributedDataParallelKwargs"))) from error
    _expect("ddp_handler", value, DistributedDataParallelKwargs, optional=True)
    vars(accelerator)["_ddp_handler"] = value
    if not isinstance(accelerator.backend, DDPBackend):
        return
    cls = DistributedDataParallelKwargs if value is None else type(value)
    made, provenance = resolve_settings(cls, value, Sources.of(dict(os.environ)), owner="ddp")
    if value is not None:
        # Share the values, so that later changes to the script's own object also have an effect.
        value.__dict__ = made.__dict__
    accelerator.backend.settings = made if value is None else value
    accelerator._setup.settings[accelerator._setup.backend_record] = {
        name: _assigned(one, "ddp_handler") for name, one in provenance.items()
    }


def _assigned(one: SourcedValue, name: str) -> SourcedValue:
    by_script = one.origin.startswith("constructor argument")
    return SourcedValue(one.value, f"accelerator.{name}") if by_script else one


def _set_autocast_handler(accelerator: Any, value: Any) -> None:
    _expect("autocast_handler", value, AutocastKwargs, optional=True)
    accelerator._options.autocast_handler = value
    if value is not None and value.upcast_outputs is not None:
        accelerator.upcast_outputs = value.upcast_outputs


def _set_profile_handler(accelerator: Any, value: Any) -> None:
    kind = exported("ProfileKwargs")
    _expect("profile_handler", value, kind, optional=True)
    accelerator._setup.handlers[kind] = value


def _set_dataloader_config(accelerator: Any, value: Any) -> None:
    _expect("dataloader_config", value, DataLoaderConfiguration)
    if value.restore_positions is None:
        value.restore_positions = value.use_stateful_dataloader
    accelerator._options.dataloader_config = value


def _set_project_configuration(accelerator: Any, value: Any) -> None:
    _expect("project_configuration", value, ProjectConfiguration)
    accelerator._saving.project = value


def _set_device_placement(accelerator: Any, value: Any) -> None:
    _expect("device_placement", value, bool)
    accelerator._options.device_placement = value


def _set_step_scheduler(accelerator: Any, value: Any) -> None:
    _expect("step_scheduler_with_optimizer", value, bool)
    accelerator._options.step_scheduler_with_optimizer = value


def _set_rng_types(accelerator: Any, value: Any) -> None:
    names = check_rng_types(value)
    accelerator._options.rng_types = names


def _set_dynamo_plugin(accelerator: Any, value: Any) -> None:
    _expect("state.dynamo_plugin", value, TorchDynamoPlugin)
    before = accelerator.dynamo_plugin
    accelerator._options.dynamo_plugin = value
    try:
        check_compiler(accelerator)
    except ConfigurationError:
        accelerator._options.dynamo_plugin = before
        raise


def check_compiler(accelerator: Any) -> None:
    """Refuse a compiler that is assigned after the Accelerator was created without one.

    Raises:
        AssignmentError: the compiler would have no effect.
    """
    plugin = accelerator.dynamo_plugin
    active = {record.name for record, _, _ in accelerator._setup.plugins.plugins}
    if plugin.enabled and "torch_compile" not in active:
        raise AssignmentError(
            f"state.dynamo_plugin selects the compiler {plugin.backend!r}, but the Accelerator was "
            "created without a compiler. Pass it when you create the Accelerator: "
            f"Accelerator(dynamo_backend={plugin.backend!r})."
        )


def _set_debug(state: Any, value: Any) -> None:
    _expect("state.debug", value, bool)
    runtime = process.current_runtime()
    user = process.current_user()
    runtime.debug = value
    if user is not None:
        parts = user._collectives
        for one in (parts.world, parts.data, parts.loss):
            one.debug = value


def _set_engine(accelerator: Any, value: Any) -> None:
    if not hasattr(accelerator, "deepspeed_engine_wrapped"):
        vars(accelerator)["deepspeed_engine_wrapped"] = value
    elif value is not None and value is not accelerator.deepspeed_engine_wrapped:
        raise AssignmentError(
            "accelerator.deepspeed_engine_wrapped is the engine of the last prepared model, so only "
            "None can be assigned. Prepare the model to create an engine."
        )


def _replace_list(name: str) -> Callable[[Any, Any], None]:
    def replace(accelerator: Any, value: Any) -> None:
        # In place, because other parts use the same list.
        getattr(accelerator, name)[:] = list(value)

    return replace


_LATER = "for objects that are prepared afterwards"
_FP8 = "the recipe is part of the precision: pass it in kwargs_handlers when you create the Accelerator"
_DERIVED = "it is derived from the arguments of the Accelerator and the prepared objects"
_MADE = "pass it when you create the Accelerator"

#: Attributes of the Accelerator. Properties that the original cannot set either are not listed.
ACCELERATOR: dict[str, Rule] = {
    "ddp_handler": Rule(
        "honoured", "by DDP, for models that are prepared afterwards", _set_ddp_handler
    ),
    "autocast_handler": Rule("honoured", f"by autocast(), and {_LATER}", _set_autocast_handler),
    "profile_handler": Rule("honoured", "by profile()", _set_profile_handler),
    "dataloader_config": Rule("honoured", f"{_LATER}; also field by field", _set_dataloader_config),
    "even_batches": Rule("honoured", f"{_LATER}"),
    "gradient_accumulation_steps": Rule("honoured", "from the next micro-batch on"),
    "sync_gradients": Rule("honoured", "until the next micro-batch"),
    "step": Rule("honoured", "from the next micro-batch on"),
    "flag_tensor": Rule("honoured", "by check_trigger()"),
    "project_configuration": Rule(
        "honoured", "by the next save or load; also field by field", _set_project_configuration
    ),
    "device_placement": Rule("honoured", _LATER, _set_device_placement),
    "step_scheduler_with_optimizer": Rule(
        "honoured", "for schedulers that are prepared afterwards", _set_step_scheduler
    ),
    "rng_types": Rule("honoured", "for loaders that are prepared afterwards", _set_rng_types),
    "deepspeed_engine_wrapped": Rule("honoured", "None is accepted and frees nothing", _set_engine),
    **{
        f"_{name}": Rule("honoured", "in place", _replace_list(f"_{name}"))
        for name in ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")
    },
    "scaler_handler": Rule("no effect", "the scaler is created with the Accelerator"),
    "init_handler": Rule("no effect", "the process group is started with the Accelerator"),
    **dict.fromkeys(
        ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler"),
        Rule("refused", _FP8),
    ),
    **dict.fromkeys(
        (
            *("has_fp8_handler", "fp8_enabled", "fp8_backend", "delayed_fp8_autocast"),
            *("has_lomo_optimizer", "native_amp"),
        ),
        Rule("refused", _DERIVED),
    ),
    "scaler": Rule(
        "refused",
        "optimizers and checkpoints share it: pass GradScalerKwargs in kwargs_handlers, or another "
        "mixed_precision, when you create the Accelerator",
    ),
    "log_with": Rule("refused", _MADE),
    "trackers": Rule("refused", "init_trackers() starts the trackers in Accelerator(log_with=...)"),
    "gradient_state": Rule(
        "refused",
        "loaders, optimizers and schedulers share it: assign to its attributes, or call "
        "gradient_state.plugin_kwargs.update(...)",
    ),
    "state": Rule("refused", "assign to its attributes"),
    **{
        name: Rule("refused", f"pass it to Accelerator({name}=...), or assign to its fields")
        for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    },
}

_OF_PROCESS = "it depends on how the process was started"
#: Attributes of `accelerator.state`, `AcceleratorState()` and `PartialState()`.
STATE: dict[str, Rule] = {
    "dynamo_plugin": Rule(
        "honoured",
        "for models that are prepared afterwards, if the Accelerator was created with a compiler",
        lambda state, value: _set_dynamo_plugin(state._accelerator, value),
    ),
    **{name: ACCELERATOR[name] for name in ("fsdp_plugin", "megatron_lm_plugin")},
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins"), ACCELERATOR["deepspeed_plugin"]),
    **dict.fromkeys(("mixed_precision", "_mixed_precision"), Rule("refused", _MADE)),
    **dict.fromkeys(("parallelism_config", "device_mesh"), Rule("refused", _MADE)),
    **dict.fromkeys(
        (
            *("distributed_type", "num_processes", "process_index", "local_process_index"),
            *("device", "backend", "fork_launched", "_cpu"),
        ),
        Rule("refused", _OF_PROCESS),
    ),
    "torch_tp_plugin": Rule(
        "refused",
        "pass parallelism_config=ParallelismConfig(tp_size=...) when you create the Accelerator",
    ),
    "debug": Rule(
        "honoured", "by the next collective; assign the same value on all ranks", _set_debug
    ),
}


def assign(owner: Any, shown: str, name: str, value: Any, rules: Mapping[str, Rule]) -> bool:
    """Apply the rule for an attribute. Return False if it is an ordinary attribute.

    Args:
        owner: the Accelerator or the state.
        shown: the name of the owner in errors.
        rules: the rules for the owner's attributes.

    Raises:
        AssignmentError: the attribute cannot be replaced.
    """
    rule = rules.get(name)
    if rule is None:
        return False
    if rule.effect == "refused":
        _refuse(owner, shown, name, value, rule)
    elif rule.effect == "no effect":
        vars(owner)[name] = value
        warn(
            f"{shown}.{name} = ... has no effect: {rule.advice}. Pass it in kwargs_handlers when you "
            "create the Accelerator."
        )
    elif rule.apply is None:
        return False
    else:
        rule.apply(owner, value)
    return True


def _refuse(owner: Any, shown: str, name: str, value: Any, rule: Rule) -> None:
    now = getattr(owner, name.lstrip("_"), None)
    # Each access creates a new state object, and all of them show the same values.
    same = name == "state" and isinstance(value, type(now))
    if now is value or same or (isinstance(value, bool | int | str | list) and now == value):
        return
    raise AssignmentError(f"{shown}.{name} cannot be replaced: {rule.advice}.")


def refuse_served(accelerator: Any, name: str) -> None:
    """Refuse an assignment that would hide an attribute that an active plugin provides.

    Raises:
        AssignmentError: a plugin provides an attribute of this name.
    """
    if name in accelerator._shared_hooks.provided_attributes():
        raise AssignmentError(
            f"accelerator.{name} cannot be replaced, because an active plugin provides it. Assign to "
            "its attributes, or pass it when you create the Accelerator."
        )


# --- states -------------------------------------------------------------------------------------


def set_xla_synced(self: Any, value: bool) -> None:
    """Refuse to change whether XLA's gradients are reduced, because the backend decides that.

    Raises:
        AssignmentError: the value differs from the current one.
    """
    if value != self.is_xla_gradients_synced:
        raise AssignmentError(
            "gradient_state.is_xla_gradients_synced cannot be replaced: the backend reduces gradients "
            "when the optimizer steps."
        )


def kept() -> dict[str, Any]:
    """Return the attributes that scripts have assigned to states, which all instances share."""
    runtime = process.running()
    if runtime is None:
        return {}
    found: dict[str, Any] = vars(runtime).setdefault("_kept", {})
    return found


def assign_to_state(state: Any, name: str, value: Any) -> None:
    """Assign to an attribute of a state: by its rule, or else for all instances."""
    if assign(state, type(state).__name__, name, value, STATE):
        return
    if name.startswith("_") or hasattr(type(state), name):
        object.__setattr__(state, name, value)
    else:
        kept()[name] = value
