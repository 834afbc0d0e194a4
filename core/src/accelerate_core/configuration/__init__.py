"""Typed settings and where each value came from. Nothing here imports torch."""

from accelerate_core.configuration.core import CORE_SETTINGS, Setting
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
from accelerate_core.configuration.provenance import Because
from accelerate_core.configuration.resolve import Sources, resolve_core, resolve_settings
from accelerate_core.configuration.schema import BackendSettings, KwargsHandler, option, settings

__all__ = [
    "CORE_SETTINGS",
    "AutocastKwargs",
    "BackendSettings",
    "Because",
    "ComputeEnvironment",
    "ConfigFile",
    "DataLoaderConfiguration",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "OpenEnum",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "Setting",
    "Sources",
    "TorchDynamoPlugin",
    "default_config_path",
    "option",
    "read_config",
    "resolve_core",
    "resolve_settings",
    "settings",
]
