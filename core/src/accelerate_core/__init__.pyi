"""The public names, and where each is defined. `__init__.py` reads them from here."""

from accelerate_core.accelerator import Accelerator as Accelerator
from accelerate_core.backend import Backend as Backend
from accelerate_core.backend.precision import Precision as Precision
from accelerate_core.builtin.seed import set_seed as set_seed
from accelerate_core.config.enums import DistributedType as DistributedType
from accelerate_core.config.enums import LoggerType as LoggerType
from accelerate_core.config.enums import PrecisionType as PrecisionType
from accelerate_core.config.handlers import AutocastKwargs as AutocastKwargs
from accelerate_core.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate_core.config.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate_core.config.handlers import GradScalerKwargs as GradScalerKwargs
from accelerate_core.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accelerate_core.config.handlers import ProjectConfiguration as ProjectConfiguration
from accelerate_core.config.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate_core.config.parallelism import ParallelismConfig as ParallelismConfig
from accelerate_core.config.parallelism import (
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accelerate_core.config.schema import BackendSettings as BackendSettings
from accelerate_core.config.schema import KwargsHandler as KwargsHandler
from accelerate_core.config.schema import option as option
from accelerate_core.config.schema import origin_of as origin_of
from accelerate_core.config.schema import settings as settings
from accelerate_core.contract.hooks import API_VERSION as API_VERSION
from accelerate_core.contract.hooks import hookimpl as hookimpl
from accelerate_core.contract.view import AcceleratorView as AcceleratorView
from accelerate_core.contract.view import SetupView as SetupView
from accelerate_core.data.prepare_loader import skip_first_batches as skip_first_batches
from accelerate_core.distributed.process import process_global as process_global
from accelerate_core.plugins.contributed import *  # noqa: F403
from accelerate_core.plugins.selection import Claim as Claim
from accelerate_core.plugins.selection import Request as Request
from accelerate_core.state import AcceleratorState as AcceleratorState
from accelerate_core.state import PartialState as PartialState
from accelerate_core.training.gradient_state import GradientState as GradientState

__version__: str
