"""Experiment tracking: the base class of trackers, the normalisation of values, the fan-out."""

from __future__ import annotations

from accelerate_core.tracking.fanout import TrackerHub, normalise_log_with
from accelerate_core.tracking.media import pictures
from accelerate_core.tracking.normalise import Reporter, normalise_config, normalise_values, split
from accelerate_core.tracking.tracker import (
    VERBS,
    BlankTracker,
    GeneralTracker,
    IncompleteTrackerError,
    RunGroup,
    on_main_process,
)

__all__ = [
    "VERBS",
    "BlankTracker",
    "GeneralTracker",
    "IncompleteTrackerError",
    "Reporter",
    "RunGroup",
    "TrackerHub",
    "normalise_config",
    "normalise_log_with",
    "normalise_values",
    "on_main_process",
    "pictures",
    "split",
]
