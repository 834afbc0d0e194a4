"""Typed settings and where each value came from. Nothing here imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_core.configuration.core import CORE_SETTINGS, CoreSettings
    from accelerate_core.configuration.enums import (
        ComputeEnvironment,
        DistributedType,
        LoggerType,
        OpenEnum,
        PrecisionType,
        RNGType,
    )
    from accelerate_core.configuration.files import ConfigFile, default_config_path, read_config
    from accelerate_core.configuration.handlers import (
        AutocastKwargs,
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accelerate_core.configuration.parallelism import (
        ParallelismConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
        TorchTensorParallelPlugin,
    )
    from accelerate_core.configuration.provenance import Because
    from accelerate_core.configuration.resolve import Sources, resolve_core, resolve_settings
    from accelerate_core.configuration.schema import (
        BackendSettings,
        KwargsHandler,
        option,
        origin_of,
        settings,
    )

__all__ = [
    "CORE_SETTINGS",
    "AutocastKwargs",
    "BackendSettings",
    "Because",
    "ComputeEnvironment",
    "ConfigFile",
    "CoreSettings",
    "DataLoaderConfiguration",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "OpenEnum",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "Sources",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "default_config_path",
    "option",
    "origin_of",
    "read_config",
    "resolve_core",
    "resolve_settings",
    "settings",
]

# On first use: pydantic costs a tenth of a second, which a command's help need not pay.
_HOMES = {
    "CORE_SETTINGS": "core",
    "CoreSettings": "core",
    "ComputeEnvironment": "enums",
    "DistributedType": "enums",
    "LoggerType": "enums",
    "OpenEnum": "enums",
    "PrecisionType": "enums",
    "RNGType": "enums",
    "ConfigFile": "files",
    "default_config_path": "files",
    "read_config": "files",
    "AutocastKwargs": "handlers",
    "DataLoaderConfiguration": "handlers",
    "GradientAccumulationPlugin": "handlers",
    "GradScalerKwargs": "handlers",
    "InitProcessGroupKwargs": "handlers",
    "ProfileKwargs": "handlers",
    "ProjectConfiguration": "handlers",
    "TorchDynamoPlugin": "handlers",
    "ParallelismConfig": "parallelism",
    "TorchContextParallelConfig": "parallelism",
    "TorchTensorParallelConfig": "parallelism",
    "TorchTensorParallelPlugin": "parallelism",
    "Because": "provenance",
    "Sources": "resolve",
    "resolve_core": "resolve",
    "resolve_settings": "resolve",
    "BackendSettings": "schema",
    "KwargsHandler": "schema",
    "option": "schema",
    "origin_of": "schema",
    "settings": "schema",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
