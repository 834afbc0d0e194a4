"""Aim for accelerate-core."""

from accelerate_aim.tracker import AimTracker

__all__ = ["AimTracker"]
__version__ = "0.1.0"
