"""Trackio for accelerate-core."""

from accelerate_trackio.tracker import TrackioTracker

__all__ = ["TrackioTracker"]
__version__ = "0.1.0"
