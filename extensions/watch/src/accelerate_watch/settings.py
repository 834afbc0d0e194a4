"""The settings of hang and straggler reports, and how settings activate the other plugins."""

from __future__ import annotations

from accelerate_core.plugin import Claim, KwargsHandler, Request, option, settings


def claim_if_configured(request: Request, cls: type[KwargsHandler], section: str) -> Claim | None:
    """Claim a run with an instance of `cls` in `kwargs_handlers`, or with its section in the config file."""
    handlers = request.arguments.get("kwargs_handlers") or ()
    if any(isinstance(one, cls) for one in handlers):
        return Claim(0, f"kwargs_handlers contains a {cls.__name__}")
    if request.config is not None and request.config.get(section):
        return Claim(0, request.config.where(section))
    return None


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
