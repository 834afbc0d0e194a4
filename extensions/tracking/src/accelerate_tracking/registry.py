"""Where a name in `log_with` leads: to a class of the script's own, or to an installed plugin."""

from __future__ import annotations

from typing import TypeGuard

from accelerate_core.config.enums import LoggerType
from accelerate_core.errors import ConfigurationError, TrackerError
from accelerate_core.plugins.discovery import check_api_version, find, installed
from accelerate_tracking.tracker import GeneralTracker

_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Let a tracker class of your own be asked for by its name, and be part of `"all"`.

    Call it before the `Accelerator` is made; it returns the class, so that it can decorate one.
    Registering a class again, or one that is defined anew in a notebook, replaces it.

    Raises:
        TrackerError: it is no subclass of `GeneralTracker`, or lacks a name or
            `requires_logging_directory`.
        ConfigurationError: the name is that of an installed tracker, or `all`.
    """
    if not is_tracker_class(tracker_class):
        raise TrackerError(
            f"register_tracker_class takes a subclass of GeneralTracker, not {tracker_class!r}."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise TrackerError(
            f"{tracker_class.__qualname__} needs a class attribute such as name = 'my_tracker'."
        )
    if not isinstance(getattr(tracker_class, "requires_logging_directory", None), bool):
        raise TrackerError(
            f"{tracker_class.__qualname__} needs a class attribute "
            "requires_logging_directory = True or False."
        )
    if name == "all" or any(record.name == name for record in installed().of_kind("tracker")):
        raise ConfigurationError(f"The name {name!r} is taken by a tracker that is installed.")
    _registered[name] = tracker_class
    LoggerType.register(name)
    return tracker_class


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class for a name in `log_with`.

    Raises:
        PluginVersionError: it was written for another major version of the contract.
        MissingPluginError: there is none; the text has the pip command or the nearest name.
        TrackerError: what is installed by that name is no tracker.
    """
    own = _registered.get(name)
    if own is not None:
        return own
    record = find("tracker", name, because="log_with")
    found: type[GeneralTracker] = record.load()
    if getattr(found, "api_version", None) is not None:
        check_api_version(record, found)
    if not is_tracker_class(found):
        raise TrackerError(f"{found!r} is offered as a tracker but is no GeneralTracker class.")
    return found


def is_tracker_class(given: object) -> TypeGuard[type[GeneralTracker]]:
    """Tell whether it is a tracker class, not an instance or something else."""
    return isinstance(given, type) and issubclass(given, GeneralTracker)


def available_names() -> list[str]:
    """Return the names that `"all"` looks at."""
    return [*(record.name for record in installed().of_kind("tracker")), *_registered]


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers that are installed or registered; whether they can run is not asked."""
    return [LoggerType(name) for name in available_names()]
