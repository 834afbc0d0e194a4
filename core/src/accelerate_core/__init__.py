"""Run a raw PyTorch training loop on any setup by changing five lines.

Everything is imported on first use: `import accelerate_core` does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_core.accelerator import Accelerator as Accelerator
    from accelerate_core.backend import Backend as Backend
    from accelerate_core.config.enums import DistributedType as DistributedType
    from accelerate_core.config.handlers import AutocastKwargs as AutocastKwargs
    from accelerate_core.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
    from accelerate_core.config.handlers import (
        GradientAccumulationPlugin as GradientAccumulationPlugin,
    )
    from accelerate_core.config.handlers import GradScalerKwargs as GradScalerKwargs
    from accelerate_core.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accelerate_core.config.handlers import ProfileKwargs as ProfileKwargs
    from accelerate_core.config.handlers import ProjectConfiguration as ProjectConfiguration
    from accelerate_core.config.handlers import TorchDynamoPlugin as TorchDynamoPlugin
    from accelerate_core.config.parallelism import ParallelismConfig as ParallelismConfig
    from accelerate_core.config.schema import BackendSettings as BackendSettings
    from accelerate_core.config.schema import KwargsHandler as KwargsHandler
    from accelerate_core.config.schema import option as option
    from accelerate_core.config.schema import origin_of as origin_of
    from accelerate_core.config.schema import settings as settings
    from accelerate_core.contract.view import AcceleratorView as AcceleratorView
    from accelerate_core.distributed.process import once as once
    from accelerate_core.hookspecs import hookimpl as hookimpl
    from accelerate_core.plugins.selection import Claim as Claim
    from accelerate_core.plugins.selection import Request as Request
    from accelerate_core.precision import Precision as Precision

__version__ = "0.1.0"

#: Module -> the public names that live there.
_MODULES = {
    "accelerator": "Accelerator",
    "backend": "Backend",
    "builtin.memory": "find_executable_batch_size release_memory",
    "builtin.seed": "set_seed",
    "compilation": "compile_regions",
    "config.enums": "ComputeEnvironment DistributedType LoggerType PrecisionType RNGType",
    "config.handlers": "AutocastKwargs DataLoaderConfiguration GradScalerKwargs "
    "GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs ProjectConfiguration "
    "TorchDynamoPlugin",
    "config.parallelism": "ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig "
    "TorchTensorParallelPlugin",
    "config.schema": "BackendSettings KwargsHandler option origin_of settings",
    "contract.view": "AcceleratorView",
    "data.prepare": "skip_first_batches",
    "distributed.process": "once",
    "hookspecs": "API_VERSION hookimpl",
    "local_sgd": "LocalSGD",
    "logging": "get_logger",
    "plugins.selection": "Claim Request",
    "precision": "Precision",
    "state": "AcceleratorState GradientState PartialState",
}
_HOMES = {
    name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    home = _HOMES.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # before anybody's lent name
    from accelerate_core.errors import did_you_mean
    from accelerate_core.plugins import exports

    try:
        return exports.resolve(name)
    except AttributeError as error:
        if str(error) != name:  # it says more
            raise
        known = [*_HOMES, *exports.exported_names()]
        raise AttributeError(
            f"module 'accelerate_core' has no attribute {name!r}.{did_you_mean(name, known)}"
        ) from None


def __dir__() -> list[str]:
    from accelerate_core.plugins import exports

    return sorted({*globals(), *_HOMES, *exports.exported_names()})
