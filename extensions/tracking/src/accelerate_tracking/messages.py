"""Warnings about failing trackers and about values that cannot be logged."""

from __future__ import annotations

import importlib.metadata
import logging

from accelerate_core.plugin import installed, warn
from accelerate_tracking.choice import Asked, name_of
from accelerate_tracking.normalise import NotTaken

_logger = logging.getLogger(__name__)


def why_not(value: object) -> str:
    """Return why `log` cannot log a value."""
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        what = f"is a {kind} of shape {tuple(shape)}, but log accepts single numbers and strings"
        return f"{what}. Reduce it first, or use log_images, log_histogram or log_table"
    return (
        f"is a {kind}, which none of your trackers accepts. Log numbers, strings, or dicts of them"
    )


def report_failure(tracker: Asked, stage: str, error: BaseException, off: bool = True) -> None:
    """Warn that a tracker raised. `off` says that the tracker was turned off."""
    name = name_of(tracker)
    _logger.debug("tracker %r raised in %s", name, stage, exc_info=error)
    owner = f"The tracker {name!r}{_distribution_of(tracker)}"
    if isinstance(error, NotTaken):
        text = f"{owner} did not accept everything in {stage.partition(' of ')[0]}: {error}."
    else:
        what = "was turned off. The run continues" if off else "skips this entry"
        text = f"{owner} raised in {stage} and {what}. {type(error).__name__}: {error}"
        if "same thread" in str(error) or "different thread" in str(error):
            text += " Its library can only be used from one thread: set `same_thread = True` in "
            text += "the tracker class."
    warn(text, RuntimeWarning)


def _distribution_of(tracker: Asked) -> str:
    """Return " (distribution version)" of the package of a tracker, or "" if it is not known."""
    cls = tracker if isinstance(tracker, type) else type(tracker)
    package = cls.__module__.partition(".")[0]
    for record in installed().of_kind("tracker"):  # also finds editable installs
        if record.target.replace(":", ".").split(".")[0] == package:
            return f" ({record.distribution} {record.version})"
    try:
        found = importlib.metadata.packages_distributions().get(package, [])
        return "".join(f" ({each} {importlib.metadata.version(each)})" for each in found[:1])
    except Exception:
        return ""
