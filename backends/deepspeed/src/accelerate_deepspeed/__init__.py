"""DeepSpeed for accelerate-core. Importing this package doesn't import deepspeed."""

from accelerate_deepspeed.backend import DeepSpeedBackend
from accelerate_deepspeed.config import HfDeepSpeedConfig
from accelerate_deepspeed.optimizers import DummyOptim, DummyScheduler
from accelerate_deepspeed.settings import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig

__all__ = [
    "DeepSpeedBackend",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
]
