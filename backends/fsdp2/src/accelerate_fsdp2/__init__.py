"""FSDP2 and the device mesh for accelerate-core."""

from accelerate_fsdp2.backend import FSDP2Backend
from accelerate_fsdp2.settings import FullyShardedDataParallelPlugin

__all__ = ["FSDP2Backend", "FullyShardedDataParallelPlugin"]
__version__ = "0.1.0"
