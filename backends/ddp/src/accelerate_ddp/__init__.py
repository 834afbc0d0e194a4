"""DistributedDataParallel for accelerate-core."""

from accelerate_ddp.backend import DDPBackend
from accelerate_ddp.hooks import DDPCommunicationHookType
from accelerate_ddp.local_sgd import LocalSGD
from accelerate_ddp.settings import DistributedDataParallelKwargs

__all__ = ["DDPBackend", "DDPCommunicationHookType", "DistributedDataParallelKwargs", "LocalSGD"]
__version__ = "0.1.0"
