"""Reports of ranks that are stuck or slow, and guards against bad steps."""

from __future__ import annotations

from accelerate_watch.guard import Guard, GuardError, GuardKwargs, StepGuard
from accelerate_watch.plugin import Watch
from accelerate_watch.settings import WatchConfiguration

__all__ = ["Guard", "GuardError", "GuardKwargs", "StepGuard", "Watch", "WatchConfiguration"]
