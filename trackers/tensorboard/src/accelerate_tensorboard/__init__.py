"""TensorBoard event files for accelerate-core."""

from accelerate_tensorboard.tracker import TensorBoardTracker

__all__ = ["TensorBoardTracker"]
__version__ = "0.1.0"
