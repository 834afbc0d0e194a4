"""Hang and straggler reports: which rank is stuck, at which step and collective, and where."""

from __future__ import annotations

from accelerate_watch.plugin import Watch
from accelerate_watch.settings import WatchConfiguration

__all__ = ["Watch", "WatchConfiguration"]
