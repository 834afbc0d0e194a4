"""The step: optimizer and scheduler wrappers, accumulation, mixed precision forward."""

from accelerate_core.step.gradient_state import GradientState
from accelerate_core.step.items import ItemCount
from accelerate_core.step.optimizer import AcceleratedOptimizer
from accelerate_core.step.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler", "GradientState", "ItemCount"]
