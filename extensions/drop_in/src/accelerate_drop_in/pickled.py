"""Pickle classes by the names that they have in Accelerate, so that each library loads the other's files.

Libraries pickle settings, as Transformers does in `training_args.bin`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import typing
from collections.abc import Callable
from typing import Any

#: The module in which Accelerate defines each class that libraries pickle.
_MODULES = {
    "PartialState": "state",
    "ParallelismConfig": "parallelism_config",
    "HfDeepSpeedConfig": "utils.deepspeed",
    **dict.fromkeys(
        (
            *("AORecipeKwargs", "AutocastKwargs", "BnbQuantizationConfig", "ComputeEnvironment"),
            *("CustomDtype", "DDPCommunicationHookType", "DataLoaderConfiguration"),
            *(
                "DeepSpeedPlugin",
                "DeepSpeedSequenceParallelConfig",
                "DistributedDataParallelKwargs",
            ),
            *("DistributedType", "DynamoBackend", "FP8BackendType", "FP8RecipeKwargs"),
            *("FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin"),
            *("InitProcessGroupKwargs", "LoggerType", "MSAMPRecipeKwargs", "MegatronLMPlugin"),
            *("PrecisionType", "ProfileKwargs", "ProjectConfiguration", "RNGType"),
            *("SageMakerDistributedType", "TERecipeKwargs", "TensorInformation"),
            *("TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig"),
            "TorchTensorParallelPlugin",
        ),
        "utils.dataclasses",
    ),
}
#: Handlers other than `...Kwargs` whose `to_kwargs` in Accelerate raises an error for an unknown attribute.
_STRICT = ("GradientAccumulationPlugin", "TorchDynamoPlugin")


def publish(name: str, cls: Any) -> None:
    """Give a class its module in Accelerate, if libraries pickle it."""
    module = f"accelerate.{_MODULES.get(name, '')}"
    if name not in _MODULES or cls.__module__ == module:
        return
    if dataclasses.is_dataclass(cls):
        _resolve_annotations(cls)
    if hasattr(cls, "__settings_names__"):
        cls.__getstate__, cls.__setstate__ = _written, _restore
        cls.__copy__, cls.__deepcopy__ = _copy, _deepcopy
    elif name == "HfDeepSpeedConfig":
        cls.__getstate__ = _written_engine_config
    cls.__module__ = module


def _resolve_annotations(cls: Any) -> None:
    """Replace annotations that are text, because the other module does not have their names."""
    hints = typing.get_type_hints(cls, include_extras=True)
    own = vars(cls).get("__annotations__", {})
    cls.__annotations__ = {name: hints[name] for name in own}
    for field in dataclasses.fields(cls):
        field.type = hints[field.name]


def _published_name(cls: type[Any]) -> str:
    """Return the name of the nearest class that Accelerate has, because users subclass these."""
    return next(base.__name__ for base in cls.__mro__ if base.__module__.startswith("accelerate."))


def _written(self: Any) -> dict[str, Any]:
    """Return the attributes that Accelerate's object has, and additional ones where these do no harm."""
    name = _published_name(type(self))
    state = {key: value for key, value in vars(self).items() if key != "__provenance__"}
    for kind in {type(value).__name__ for value in state.values()} & set(_MODULES):
        _served(kind)  # publishes the class if the script has not used its name
    if name.endswith("Kwargs") or name in _STRICT:
        # Accelerate reads a missing attribute from the class, where it has the default.
        given = state.pop("__given__", ())
        defaults = _defaults(type(self), factories=False)
        state = {
            key: value
            for key, value in state.items()
            if key in given or key not in defaults or value != defaults[key]
        }
    return state | _converted(_TO_ACCELERATE, self, state)


def _restore(self: Any, state: dict[str, Any]) -> None:
    """Restore settings that this library or Accelerate has pickled."""
    defaults = _defaults(type(self))
    state = {
        key: value
        for key, value in state.items()
        if key in defaults or not hasattr(type(self), key)
    }
    state |= _converted(_FROM_ACCELERATE, self, state)
    changed = {key for key in defaults if key in state and state[key] != defaults[key]}
    # `vars`, because the values are checked already.
    vars(self).update(defaults | {"__given__": frozenset(changed)} | state)


def _served(name: str) -> Any:
    return getattr(importlib.import_module(f"accelerate.{_MODULES[name]}"), name)


def _defaults(cls: Any, factories: bool = True) -> dict[str, Any]:
    """Return the defaults of the fields that have one, without `factories` only those of the class."""
    values = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif factories and field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


def _copy(self: Any) -> Any:
    result = object.__new__(type(self))
    vars(result).update(vars(self))
    return result


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    result = memo[id(self)] = object.__new__(type(self))
    vars(result).update(copy.deepcopy(vars(self), memo))
    return result


def _written_engine_config(self: Any) -> dict[str, Any]:
    """Return the attributes of Accelerate's config, which has read the stage and the offloading."""
    zero = self.config.get("zero_optimization") or {}
    sections = [zero.get(f"offload_{part}") or {} for part in ("optimizer", "param")]
    offload = any(section.get("device") in ("cpu", "nvme") for section in sections)
    return {**vars(self), "_stage": zero.get("stage", -1), "_offload": offload}


def _compiler_of(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {"backend": _served("DynamoBackend")((plugin.backend or "no").upper())}


def _compiler_from(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    name = str(getattr(state["backend"], "value", state["backend"])).lower()
    return {"backend": None if name == "no" else name}


def _state_dict_type_of(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.fsdp import StateDictType

    kind = state["state_dict_type"]
    return {"state_dict_type": StateDictType[kind.upper()] if isinstance(kind, str) else kind}


def _state_dict_type_from(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    kind = state["state_dict_type"]
    return {"state_dict_type": getattr(kind, "name", kind)}


def _engine_config_of(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    config = getattr(plugin.hf_ds_config, "config", None)
    return {"deepspeed_config": config, "_selected": False}


def _sizes_of(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "_sizes": dict(plugin._sizes),
        "cp_backend": plugin.cp_backend or "torch",
        "sp_backend": plugin.sp_backend or "deepspeed",
    }


def _sizes_from(plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    # Accelerate sets the only value of each; here it means that the caller passed it.
    given = state.get("__given__", ())
    return {name: None for name in ("cp_backend", "sp_backend") if name not in given}


_Converter = Callable[[Any, dict[str, Any]], dict[str, Any]]
#: Attributes that have other types or names in Accelerate's class, or that it computes.
_TO_ACCELERATE: dict[str, _Converter] = {
    "TorchDynamoPlugin": _compiler_of,
    "FullyShardedDataParallelPlugin": _state_dict_type_of,
    "DeepSpeedPlugin": _engine_config_of,
    "ParallelismConfig": _sizes_of,
}
_FROM_ACCELERATE: dict[str, _Converter] = {
    "TorchDynamoPlugin": _compiler_from,
    "FullyShardedDataParallelPlugin": _state_dict_type_from,
    "ParallelismConfig": _sizes_from,
}


def _converted(table: dict[str, _Converter], plugin: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that the table converts for the class of a settings object."""
    converter = table.get(_published_name(type(plugin)))
    return converter(plugin, state) if converter else {}
