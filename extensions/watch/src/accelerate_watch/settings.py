"""The settings of reports about ranks, and how settings activate the other plugins."""

from __future__ import annotations

from typing import Literal

from accelerate_core.plugin import (
    AccelerateError,
    Claim,
    KwargsHandler,
    Request,
    option,
    settings,
)


class DriftError(AccelerateError, RuntimeError):
    """Ranks drifted apart, and `drift="error"` is set.

    Cause: a fact that must be equal on all ranks differs; the message names it, the ranks and the values.
    Fix: the message has the likely cause. `drift="warn"` continues the run.
    """


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
    """When a run reports ranks that are stuck, slow, or drift apart.

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
    drift: Literal["warn", "error", "off"] = option(
        default="warn",
        help="what to do if learning rates, trained parameters, orders of data or numbers of steps differ on "
        "ranks that must have the same: warn once, end the run with an error, or don't compare them",
    )
