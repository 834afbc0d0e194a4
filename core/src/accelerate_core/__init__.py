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
    from accelerate_core.backend import Precision as Precision
    from accelerate_core.configuration import AutocastKwargs as AutocastKwargs
    from accelerate_core.configuration import BackendSettings as BackendSettings
    from accelerate_core.configuration import DataLoaderConfiguration as DataLoaderConfiguration
    from accelerate_core.configuration import DistributedType as DistributedType
    from accelerate_core.configuration import (
        GradientAccumulationPlugin as GradientAccumulationPlugin,
    )
    from accelerate_core.configuration import GradScalerKwargs as GradScalerKwargs
    from accelerate_core.configuration import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accelerate_core.configuration import KwargsHandler as KwargsHandler
    from accelerate_core.configuration import ParallelismConfig as ParallelismConfig
    from accelerate_core.configuration import ProfileKwargs as ProfileKwargs
    from accelerate_core.configuration import ProjectConfiguration as ProjectConfiguration
    from accelerate_core.configuration import TorchDynamoPlugin as TorchDynamoPlugin
    from accelerate_core.configuration import option as option
    from accelerate_core.configuration import origin_of as origin_of
    from accelerate_core.configuration import settings as settings
    from accelerate_core.contract.view import AcceleratorView as AcceleratorView
    from accelerate_core.distributed.process import once as once
    from accelerate_core.hookspecs import hookimpl as hookimpl
    from accelerate_core.plugins.selection import Claim as Claim
    from accelerate_core.plugins.selection import Request as Request

__version__ = "0.1.0"

_SETTINGS = (
    "AutocastKwargs BackendSettings ComputeEnvironment DataLoaderConfiguration DistributedType "
    "GradScalerKwargs TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin "
    "GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType "
    "ParallelismConfig PrecisionType ProfileKwargs ProjectConfiguration RNGType TorchDynamoPlugin "
    "option origin_of settings"
)
_HOMES = {
    **dict.fromkeys(_SETTINGS.split(), "accelerate_core.configuration"),
    "API_VERSION": "accelerate_core.hookspecs",
    "Accelerator": "accelerate_core.accelerator",
    "AcceleratorView": "accelerate_core.contract.view",
    "Backend": "accelerate_core.backend",
    "Claim": "accelerate_core.plugins.selection",
    "GradientState": "accelerate_core.state",
    "LocalSGD": "accelerate_core.local_sgd",
    "PartialState": "accelerate_core.state",
    "AcceleratorState": "accelerate_core.state",
    "Precision": "accelerate_core.backend",
    "Request": "accelerate_core.plugins.selection",
    "compile_regions": "accelerate_core.compilation",
    "find_executable_batch_size": "accelerate_core.builtin.memory",
    "get_logger": "accelerate_core.logging",
    "hookimpl": "accelerate_core.hookspecs",
    "once": "accelerate_core.distributed.process",
    "release_memory": "accelerate_core.builtin.memory",
    "skip_first_batches": "accelerate_core.data",
    "set_seed": "accelerate_core.builtin.seed",
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
