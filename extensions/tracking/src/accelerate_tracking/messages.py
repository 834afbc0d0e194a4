"""What is said of trackers and values that went wrong."""

from __future__ import annotations

import importlib.metadata
import logging

from accelerate_core.plugin import installed, warn
from accelerate_tracking.choice import Asked, name_of
from accelerate_tracking.normalise import NotTaken

_logger = logging.getLogger(__name__)


def why_not(value: object) -> str:
    """Say why `log` does not take a value."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        what = f"is a {kind} of shape {tuple(shape)}; log takes single numbers and strings"
        return f"{what}: reduce it first, or use log_images, log_histogram or log_table"
    return f"is a {kind}, which no tracker takes; log takes numbers, strings and dicts of them"


def report_failure(tracker: Asked, stage: str, error: BaseException, off: bool = True) -> None:
    """Warn that a tracker raised; with `off` it is not asked again."""
    name = name_of(tracker)
    _logger.debug("tracker %r raised in %s", name, stage, exc_info=error)
    owner = f"The tracker {name!r}{_distribution_of(tracker)}"
    if isinstance(error, NotTaken):
        text = f"{owner} did not take all of {stage.partition(' of ')[0]}: {error}."
    else:
        what = "is switched off; the run goes on" if off else "goes on without it"
        text = f"{owner} raised in {stage} and {what}. {type(error).__name__}: {error}"
        if "same thread" in str(error) or "different thread" in str(error):
            text += " Its library is bound to one thread: set `same_thread = True` in its class."
    warn(text, RuntimeWarning)


def _distribution_of(tracker: Asked) -> str:
    """Return ` (distribution and version)` of the package a tracker comes from, if it is known."""
    cls = tracker if isinstance(tracker, type) else type(tracker)
    package = cls.__module__.partition(".")[0]
    for record in installed().of_kind("tracker"):  # also where its files lie in a checkout
        if record.target.replace(":", ".").split(".")[0] == package:
            return f" ({record.distribution} {record.version})"
    try:
        found = importlib.metadata.packages_distributions().get(package, [])
        return "".join(f" ({each} {importlib.metadata.version(each)})" for each in found[:1])
    except Exception:
        return ""
