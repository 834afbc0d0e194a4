"""What is said of trackers and values that went wrong, and the checks before that."""

from __future__ import annotations

import logging
import operator
import warnings
from typing import Any

from accelerate_core.errors import ConfigurationError
from accelerate_tracking.choice import Asked, distribution_of, name_of
from accelerate_tracking.normalise import NotTaken

__all__ = ["report_failure", "whole", "why_not"]

_logger = logging.getLogger(__name__)


def whole(step: Any) -> int | None:
    """Return a step as an int.

    Raises:
        ConfigurationError: it is no whole number.
    """
    if step is None or type(step) is int:
        return step
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise ConfigurationError(
        f"log(step=...) takes a whole number or None, not {step!r} ({type(step).__name__})."
    )


def why_not(value: object) -> str:
    """Say why `log` does not take a value."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        what = f"is a {kind} of shape {tuple(shape)}; log takes single numbers and strings"
        return f"{what}: reduce it first, or use log_images, log_histogram or log_table"
    return f"is a {kind}, which no tracker takes; log takes numbers, strings and dicts of them"


def report_failure(
    tracker: Asked, stage: str, error: Exception, off: bool = True, hint: str = ""
) -> None:
    """Warn that a tracker raised; with `off` it is not asked again."""
    name = name_of(tracker)
    _logger.debug("tracker %r raised in %s", name, stage, exc_info=error)
    owner = distribution_of(tracker if isinstance(tracker, type) else type(tracker))
    if isinstance(error, NotTaken):
        text = f"The tracker {name!r}{owner} did not take all of {stage.partition(' of ')[0]}: {error}."
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return
    what = "is switched off; the run goes on" if off else "goes on without it"
    if "same thread" in str(error) or "different thread" in str(error):
        hint += " Its library is bound to one thread: set `same_thread = True` in its class."
    warnings.warn(
        f"The tracker {name!r}{owner} raised in {stage} and {what}. "
        f"{type(error).__name__}: {error}{hint}",
        RuntimeWarning,
        stacklevel=5,
    )
