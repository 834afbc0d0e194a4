"""SwanLab for accelerate-core."""

from accelerate_swanlab.tracker import SwanLabTracker

__all__ = ["SwanLabTracker"]
__version__ = "0.1.0"
