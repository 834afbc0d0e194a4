"""Who tracks: what `log_with` asks for, what `"all"` stands for, and why one is passed over."""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import os
import warnings
from typing import Any

from accelerate_core.errors import (
    ConfigurationError,
    MissingPluginError,
    TrackerError,
    did_you_mean,
)
from accelerate_core.plugins.discovery import installed
from accelerate_tracking import registry
from accelerate_tracking.tracker import GeneralTracker

__all__ = ["ALL", "Asked", "Requested", "choose", "name_of", "normalise_log_with", "passed_over"]

ALL = "all"

#: A tracker class to be built, or an instance.
Asked = type[GeneralTracker] | GeneralTracker
Requested = str | Asked


def normalise_log_with(log_with: object) -> list[Requested]:
    """Return what `log_with` asks for as a list of names, tracker classes and instances.

    Args:
        log_with: None, a name, a `LoggerType` or other string enum, a tracker
            class, an instance, or a list, tuple or set of those. `"all"` is kept
            as a name; what it stands for is decided by `choose`.

    Raises:
        TypeError: something else was given.
        IncompleteTrackerError: an instance lacks what every tracker must have.
    """
    if log_with is None:
        return []
    if isinstance(log_with, (list, tuple, set, frozenset)):
        asked = [_normalise_one(item) for item in log_with]
    else:
        asked = [_normalise_one(log_with)]
    once: list[Requested] = []
    for item in asked:
        if not any(item is known or (isinstance(item, str) and item == known) for known in once):
            once.append(item)
    return once


def _normalise_one(item: object) -> Requested:
    if isinstance(item, enum.Enum):
        item = item.value
    if isinstance(item, str):
        name = str(item)
        return ALL if name.lower() == ALL else name
    if isinstance(item, GeneralTracker) or (
        isinstance(item, type) and issubclass(item, GeneralTracker)
    ):
        return item
    what = f"the class {item.__qualname__}" if isinstance(item, type) else type(item).__name__
    raise TypeError(
        f"log_with takes names of trackers, GeneralTracker classes or instances, and 'all'; "
        f"got {what}. A tracker of your own must be a subclass of GeneralTracker."
    )


def choose(
    requested: list[Requested],
    logging_dir: str | os.PathLike[str] | None,
    is_main: bool,
) -> list[Asked]:
    """Return the trackers that are to run, those asked for by name first.

    Raises:
        MissingPluginError: one asked for by name, or its library, is not installed.
        ConfigurationError: one asked for requires a directory and there is none.
    """
    chosen = _named(requested, logging_dir, is_main)
    if ALL not in requested:
        return chosen
    taken = {name_of(item) for item in chosen}
    for name in registry.available_names():
        if name in taken:
            continue
        try:
            tracker = registry.tracker_class(name)
            _check_class(tracker)
            why = passed_over(tracker, logging_dir)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why is None:
            if tracker not in chosen:
                chosen.append(tracker)
        elif is_main:
            warnings.warn(f"log_with='all' passes over the tracker {name!r}: {why}.", stacklevel=4)
    if not chosen:
        warnings.warn(
            "log_with='all' found no tracker that can be used here; nothing is tracked.",
            stacklevel=3,
        )
    return chosen


def _named(
    requested: list[Requested],
    logging_dir: str | os.PathLike[str] | None,
    is_main: bool,
) -> list[Asked]:
    chosen: list[Asked] = []
    for item in requested:
        if item == ALL:
            continue
        tracker = registry.tracker_class(item) if isinstance(item, str) else item
        if isinstance(tracker, type):
            _check_class(tracker)
            lacking = GeneralTracker.unusable.__func__(tracker, os.environ)  # type: ignore[attr-defined]
            if lacking:
                raise MissingPluginError(f"The tracker {name_of(tracker)!r} cannot run: {lacking}.")
            if _lacks_directory(tracker, logging_dir):
                raise ConfigurationError(
                    f"The tracker {name_of(tracker)!r} writes into a directory and none is "
                    f"given. Pass Accelerator(project_dir=...) or "
                    f"ProjectConfiguration(logging_dir=...)."
                )
        elif is_main or tracker.main_process_only is False:
            tracker.validate()
        if tracker not in chosen:
            chosen.append(tracker)
    return chosen


def passed_over(
    tracker: type[GeneralTracker], logging_dir: str | os.PathLike[str] | None
) -> str | None:
    """Return why `"all"` leaves a tracker out, None if it does not."""
    if _lacks_directory(tracker, logging_dir):
        return "it writes into a directory and no logging_dir is given"
    return tracker.unusable(os.environ)


def _lacks_directory(
    tracker: type[GeneralTracker], logging_dir: str | os.PathLike[str] | None
) -> bool:
    return tracker.requires_logging_directory is True and logging_dir is None


def name_of(item: Asked) -> str:
    """Return the name by which a tracker is asked for."""
    name = getattr(item, "name", None)
    if isinstance(name, str):
        return str(name)
    return (item if isinstance(item, type) else type(item)).__name__


def _check_class(tracker: type[GeneralTracker]) -> None:
    if not (isinstance(tracker, type) and issubclass(tracker, GeneralTracker)):
        raise TrackerError(f"{tracker!r} is offered as a tracker but is no GeneralTracker class.")


def check_arguments(
    tracker: type[GeneralTracker], positional: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """Raise `ConfigurationError` if the constructor does not take these arguments."""
    try:
        signature = inspect.signature(tracker)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        wrong = next((key for key in keywords if repr(key) in str(error)), "")
        raise ConfigurationError(
            f"init_trackers cannot build the tracker {name_of(tracker)!r}: {error}. "
            f"{tracker.__qualname__} takes {signature}."
            f"{did_you_mean(wrong, signature.parameters) if wrong else ''}"
        ) from None


def distribution_of(cls: type) -> str:
    """Return ` (distribution and version)` of the package a class comes from, if it is known."""
    package = cls.__module__.partition(".")[0]
    for record in installed().of_kind("tracker"):  # also where its files lie in a checkout
        if record.target.replace(":", ".").split(".")[0] == package:
            return f" ({record.distribution} {record.version})"
    try:
        found = importlib.metadata.packages_distributions().get(package, [])
        return "".join(f" ({each} {importlib.metadata.version(each)})" for each in found[:1])
    except Exception:
        return ""
