"""Comet for accelerate-core."""

from accelerate_comet_ml.tracker import CometMLTracker

__all__ = ["CometMLTracker"]
__version__ = "0.1.0"
