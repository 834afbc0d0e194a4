"""Experiment tracking: the base class of trackers, and the hub that sends values to all of them."""

from __future__ import annotations

from typing import Any

from accelerate_tracking.choice import (
    get_available_trackers,
    is_for_every_rank,
    normalise_log_with,
    register_tracker_class,
)
from accelerate_tracking.hub import TrackerHub
from accelerate_tracking.media import pictures
from accelerate_tracking.network import unreachable
from accelerate_tracking.normalise import (
    NotTaken,
    Reporter,
    each,
    normalise_config,
    normalise_values,
    split,
)
from accelerate_tracking.tracker import (
    VERBS,
    BlankTracker,
    Columns,
    GeneralTracker,
    IncompleteTrackerError,
    Rows,
    RunGroup,
    on_main_process,
)

__all__ = [
    "VERBS",
    "BlankTracker",
    "Columns",
    "GeneralTracker",
    "IncompleteTrackerError",
    "NotTaken",
    "Reporter",
    "Rows",
    "RunGroup",
    "TrackerHub",
    "each",
    "get_available_trackers",
    "is_for_every_rank",
    "normalise_config",
    "normalise_log_with",
    "normalise_values",
    "on_main_process",
    "pictures",
    "register_tracker_class",
    "split",
    "unreachable",
]


def __getattr__(name: str) -> Any:
    """Return a tracker class exported by an installed package, as `accelerate.tracking` has them."""
    from accelerate_core.plugin import exported

    if name.startswith("__"):
        raise AttributeError(name)
    return exported(name)
