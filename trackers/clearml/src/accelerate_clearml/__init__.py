"""ClearML for accelerate-core."""

from accelerate_clearml.tracker import ClearMLTracker

__all__ = ["ClearMLTracker"]
__version__ = "0.1.0"
