"""Reports of ranks that are stuck or slow, guards against bad steps, ranks that drift apart, and goodput."""

from __future__ import annotations

from accelerate_watch.goodput import Goodput, GoodputKwargs, GoodputMeter
from accelerate_watch.guard import Guard, GuardError, GuardKwargs, StepGuard
from accelerate_watch.plugin import Watch
from accelerate_watch.settings import DriftError, WatchConfiguration

__all__ = [
    "DriftError",
    "Goodput",
    "GoodputKwargs",
    "GoodputMeter",
    "Guard",
    "GuardError",
    "GuardKwargs",
    "StepGuard",
    "Watch",
    "WatchConfiguration",
]
