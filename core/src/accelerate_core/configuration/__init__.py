"""Typed settings and where each value came from. Nothing here imports torch."""

from __future__ import annotations

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
