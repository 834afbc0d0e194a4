"""The settings of hang and straggler reports."""

from __future__ import annotations

from accelerate_core.plugin import KwargsHandler, option, settings


@settings(env_prefix="ACCELERATE_WATCH_", section="watch_config")
class WatchConfiguration(KwargsHandler):
    """When a run reports ranks that are stuck or slow.

    Example:
        accelerator = Accelerator(kwargs_handlers=[WatchConfiguration(hang_after=120)])
    """

    hang_after: float | None = option(
        default=None,
        help="seconds that a rank waits in a collective before a report is printed; 0 for never; "
        "default: 60, or half of the process group's timeout if that is less",
        ge=0,
    )
    straggler_factor: float = option(
        default=2.0,
        help="report a rank whose own work per step takes this many times the median of all ranks; "
        "0 for never",
        ge=0,
    )
    straggler_interval: float = option(
        default=30.0, help="seconds between two comparisons of the ranks' speeds", gt=0
    )
