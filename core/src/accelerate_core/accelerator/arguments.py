"""Check and convert the arguments of `Accelerator` that belong to the core, including older names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from accelerate_core.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate_core.config.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accelerate_core.config.provenance import SourcedValue
from accelerate_core.config.schema import KwargsHandler
from accelerate_core.errors import ConfigurationError, did_you_mean, listing, warn
from accelerate_core.plugins.discovery import PluginRecord, installed
from accelerate_core.plugins.selection import Selection, plugin_arguments

#: Arguments of older versions, which are not in the signature. Using one logs a warning.
OLDER = ("fp16", "torch_tp_plugin", "even_batches", "dispatch_batches")

_OF_LOADERS = ("split_batches", "even_batches", "dispatch_batches")

_CORE_HANDLERS = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs)

_PATH = (str, os.PathLike)

#: The types of arguments that are not core settings.
_TYPES: dict[str, Any] = {
    "device_placement": bool,
    "step_scheduler_with_optimizer": bool,
    "project_dir": _PATH,
    "dataloader_config": DataLoaderConfiguration,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
    "torch_tp_plugin": TorchTensorParallelPlugin,
}

_IN_WORDS: dict[Any, str] = {bool: "True or False", _PATH: "a path"}


def prepare_arguments(given: dict[str, Any]) -> None:
    """Check the types of arguments, and replace older names by current ones, in place.

    Raises:
        ConfigurationError: a value has the wrong type.
    """
    for name, kind in _TYPES.items():
        expect(name, given[name], kind)
    if given["fp16"] is not None:
        asked = "fp16" if given["fp16"] else "no"
        _warn_older("fp16", f"mixed_precision={asked!r}")
        given["mixed_precision"] = given["mixed_precision"] or asked
    for name in _OF_LOADERS:
        if given[name] is not None:
            _warn_older(name, f"dataloader_config=DataLoaderConfiguration({name}={given[name]!r})")
    if (older := given["torch_tp_plugin"]) is not None:
        size = f"ParallelismConfig(tp_size={older.tp_size})"
        _warn_older("torch_tp_plugin", f"parallelism_config={size}")
        if given["parallelism_config"] is None:
            given["parallelism_config"] = ParallelismConfig(tp_size=older.tp_size)


def _warn_older(name: str, now: str) -> None:
    # Python shows this warning once per line of the script.
    warn(f"Accelerator({name}=...) is deprecated; use {now}.", FutureWarning)


def expect(name: str, value: Any, kind: Any) -> None:
    """Check the type of an argument. None is allowed unless the argument is a flag.

    Raises:
        ConfigurationError: the value has another type.
    """
    if not isinstance(value, kind) and (value is not None or kind is bool):
        what = f"{_IN_WORDS[kind]}, not {value!r}" if kind in _IN_WORDS else ""
        what = what or f"a {kind.__name__}, not {type(value).__name__}"
        raise ConfigurationError(f"Accelerator({name}=...) takes {what}.")


def sort_handlers(handlers: Sequence[Any] | None) -> dict[type, Any]:
    """Return the objects in `kwargs_handlers` by class.

    Raises:
        ConfigurationError: an object is not a handler, or two have the same class.
    """
    sorted_: dict[type, Any] = {}
    for handler in handlers or ():
        if isinstance(handler, type) or not (
            isinstance(handler, KwargsHandler) or hasattr(type(handler), "__dataclass_fields__")
        ):
            raise ConfigurationError(
                f"kwargs_handlers takes instances of KwargsHandler, not {handler!r}."
            )
        if type(handler) in sorted_:
            raise ConfigurationError(f"kwargs_handlers has two {type(handler).__name__}; pass one.")
        sorted_[type(handler)] = handler
    return sorted_


def _package(target: str) -> str:
    return target.split(":")[0].split(".")[0]


def refuse_unclaimed(handlers: Mapping[type, Any], active: Sequence[Any]) -> None:
    """Refuse handlers that no active plugin uses.

    Handlers of inactive plugins are allowed, except those of a precision, which the script would expect
    to have an effect.
    """
    classes: tuple[type, ...] = _CORE_HANDLERS
    for plugin in active:
        classes += tuple(getattr(plugin, "handlers", ()))
        if isinstance(getattr(plugin, "Settings", None), type):
            classes += (plugin.Settings,)
    plugins = [one for one in installed().plugins if _package(one.target) != "accelerate_core"]
    precisions = {_package(one.target): one.name for one in plugins if one.kind == "precision"}
    known = {_package(one.target) for one in plugins if one.kind != "precision"}
    known |= {_package(t) for t, _ in installed().exports.values()} - {
        "accelerate_core",
        *precisions,
    }
    for cls, handler in handlers.items():
        package = _package(vars(cls).get("__settings_module__", cls.__module__))
        if not isinstance(handler, classes) and package not in known:
            names = [c.__name__ for c in classes]
            asked = f" It is for mixed_precision={precisions.get(package)!r}."
            raise ConfigurationError(
                f"No active plugin uses the {cls.__name__} in kwargs_handlers. The active plugins use "
                f"{listing(names)}.{asked if package in precisions else did_you_mean(cls.__name__, names)}"
            )


def accumulation(
    given: Mapping[str, Any], values: dict[str, SourcedValue]
) -> GradientAccumulationPlugin:
    """Return how gradients are accumulated, and store the number of steps in `values`."""
    plugin: GradientAccumulationPlugin | None = given["gradient_accumulation_plugin"]
    steps = values["gradient_accumulation_steps"]
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=steps.value)
    if given["gradient_accumulation_steps"] not in (None, 1):
        raise ConfigurationError(
            "Pass gradient_accumulation_steps or gradient_accumulation_plugin, not both."
        )
    if plugin.num_steps is None:
        return dataclasses.replace(plugin, num_steps=steps.value)
    said = "constructor argument gradient_accumulation_plugin"
    values["gradient_accumulation_steps"] = SourcedValue(plugin.num_steps, said)
    return plugin


def dataloader(given: Mapping[str, Any]) -> DataLoaderConfiguration:
    """Return how data is divided between ranks, from the config object or the older arguments."""
    older = {name: given[name] for name in _OF_LOADERS if given[name] is not None}
    if older and given["dataloader_config"] is not None:
        are, them = ("is", "it") if len(older) == 1 else ("are", "them")
        raise ConfigurationError(
            f"{listing(older)} {are} set in Accelerator, which also received a dataloader_config. "
            f"Set {them} only in dataloader_config."
        )
    return given["dataloader_config"] or DataLoaderConfiguration(**older)


def project(given: Mapping[str, Any]) -> ProjectConfiguration:
    """Return where checkpoints and logs go."""
    config: ProjectConfiguration = given["project_config"] or ProjectConfiguration()
    if given["project_dir"] is not None and config.project_dir is None:
        config.set_directories(given["project_dir"])
    return config


def timeout(seconds: float | None, handler: InitProcessGroupKwargs | None) -> timedelta | None:
    """Return the time limit of a collective. The process group handler takes precedence."""
    if handler is not None and handler.timeout is not None:
        return handler.timeout
    return timedelta(seconds=seconds) if seconds is not None else None


def check_owners(
    passed: Mapping[str, Any], selection: Selection, active: set[PluginRecord]
) -> None:
    """Refuse arguments that belong to an installed but inactive plugin, which would ignore them.

    Args:
        passed: the arguments that are not the core's.
        selection: the chosen backend.
        active: the active plugins.
    """
    # Compare names rather than records, because a class that was passed has its own record.
    names = {(record.kind, record.name) for record in active}
    for name in plugin_arguments() & {key for key, value in passed.items() if value is not None}:
        owners = [record for record in installed().plugins if name in record.triggers]
        if owners and not any((record.kind, record.name) in names for record in owners):
            states = {c.record: f"{c.state}: {c.reason}" for c in selection.candidates}
            owner = owners[0]
            why = states.get(owner, f"the backend is {selection.record.name!r}")
            raise ConfigurationError(
                f"Accelerator({name}=...) belongs to the plugin {owner.label}, which is not active "
                f"({why}; {selection.record.name!r} was chosen because of {selection.reason}). "
                f"Remove the argument, or activate the plugin."
            )
