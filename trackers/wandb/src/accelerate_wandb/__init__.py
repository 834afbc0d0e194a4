"""Weights & Biases for accelerate-core."""

from accelerate_wandb.tracker import WandBTracker

__all__ = ["WandBTracker"]
__version__ = "0.1.0"
