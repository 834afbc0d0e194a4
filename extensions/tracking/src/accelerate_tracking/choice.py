"""Choose and build the trackers that `log_with` requests."""

from __future__ import annotations

import enum
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from accelerate_core.plugin import (
    ConfigurationError,
    LoggerType,
    MissingPluginError,
    PluginFactory,
    Sources,
    TrackerError,
    did_you_mean,
    find,
    installed,
    warn,
)
from accelerate_tracking.normalise import RAISED
from accelerate_tracking.tracker import GeneralTracker, RunGroup

ALL = "all"

#: A tracker class, which will be instantiated, or an instance.
Asked = type[GeneralTracker] | GeneralTracker
Requested = str | Asked
InitKwargs = Mapping[str, Mapping[str, Any]]

_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> type[GeneralTracker]:
    """Register your own tracker class, so that `log_with` accepts its name and `"all"` includes it.

    Call this before creating the `Accelerator`. It returns the class, so you can use it as a
    decorator. Registering a class again replaces it, for example after you redefine it in a
    notebook.

    Raises:
        ConfigurationError: the class is not a subclass of `GeneralTracker`, has no name or no
            `requires_logging_directory`, or its name is `all` or the name of an installed tracker.
    """
    if not _is_tracker_class(tracker_class):
        raise ConfigurationError(
            f"register_tracker_class needs a subclass of GeneralTracker, not {tracker_class!r}."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"{tracker_class.__qualname__} needs a class attribute such as name = 'my_tracker'."
        )
    if not isinstance(getattr(tracker_class, "requires_logging_directory", None), bool):
        raise ConfigurationError(
            f"{tracker_class.__qualname__} needs a class attribute "
            "requires_logging_directory = True or False."
        )
    if name == "all" or any(record.name == name for record in installed().of_kind("tracker")):
        raise ConfigurationError(
            f"register_tracker_class: an installed tracker already has the name {name!r}. Choose "
            "another name."
        )
    before = _registered.get(name, tracker_class)
    if before.__qualname__.rpartition(".")[2] != tracker_class.__qualname__.rpartition(".")[2]:
        warn(
            f"The tracker name {name!r} now belongs to {tracker_class!r}. It replaces "
            f"{before.__qualname__}."
        )
    _registered[name] = tracker_class
    LoggerType.register(name)
    return tracker_class


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class for a name in `log_with`.

    Raises:
        PluginVersionError: it was written for another major version of the contract.
        MissingPluginError: no tracker has this name. The message has the pip command to install
            it, or the most similar name.
        TrackerError: the installed plugin of this name is not a tracker.
    """
    own = _registered.get(name)
    if own is not None:
        return own
    record = find("tracker", name, source="log_with")
    if not _is_tracker_class(record.load()):
        raise TrackerError(
            f"{record.label} is registered as a tracker, but is not a subclass of GeneralTracker."
        )
    found: type[GeneralTracker] = record.load_checked()
    return found


def _is_tracker_class(given: object) -> TypeGuard[type[GeneralTracker]]:
    return isinstance(given, type) and issubclass(given, GeneralTracker)


def available_names() -> list[str]:
    """Return the names of all installed and registered trackers."""
    named = [record.name for record in installed().of_kind("tracker")]
    return list(dict.fromkeys([*named, *_registered]))


def get_available_trackers() -> list[LoggerType]:
    """Return all installed and registered trackers, without checking whether they can run."""
    return [LoggerType(name) for name in available_names()]


def normalise_log_with(log_with: object) -> list[Requested]:
    """Return `log_with` as a list of names, tracker classes and instances without duplicates.

    Args:
        log_with: None, a name, a `LoggerType` or other string enum, a tracker class, an instance,
            or a list, tuple or set of those. The name `"all"` is kept, and `choose` expands it.

    Raises:
        TypeError: `log_with` has another type.
    """
    if log_with is None:
        return []
    several = isinstance(log_with, (list, tuple, set, frozenset))
    once: list[Requested] = []
    for item in map(_normalise_one, log_with if several else [log_with]):  # type: ignore[call-overload]
        if not any(item is known or (isinstance(item, str) and item == known) for known in once):
            once.append(item)
    return once


def _normalise_one(item: object) -> Requested:
    if isinstance(item, enum.Enum):
        item = item.value
    if isinstance(item, str):
        name = str(item)
        return ALL if name.lower() == ALL else name
    if isinstance(item, GeneralTracker) or _is_tracker_class(item):
        return item
    what = f"the class {item.__qualname__}" if isinstance(item, type) else type(item).__name__
    raise TypeError(
        "log_with accepts names of trackers, GeneralTracker classes or instances, and 'all', but "
        f"got {what}. Your own tracker must be a subclass of GeneralTracker."
    )


def choose(
    requested: list[Requested], logging_dir: str | os.PathLike[str] | None, is_main: bool
) -> list[Asked]:
    """Return the trackers to run, with those requested by name first.

    Raises:
        MissingPluginError: a requested tracker or its library is not installed.
        ConfigurationError: a requested tracker requires a directory, but none is set.
        IncompleteTrackerError: an instance lacks a required attribute.
    """
    chosen: list[Asked] = []
    for item in requested:
        if item == ALL:
            continue
        tracker = tracker_class(item) if isinstance(item, str) else item
        if isinstance(tracker, type):
            _check_usable(tracker, logging_dir)
        elif is_main or tracker.main_process_only is False:
            tracker.validate()
        if tracker not in chosen:
            chosen.append(tracker)
    if ALL in requested:
        _add_all(chosen, logging_dir, is_main)
    return chosen


def _check_usable(
    tracker: type[GeneralTracker], logging_dir: str | os.PathLike[str] | None
) -> None:
    """Refuse a requested class that cannot run. Missing accounts are reported by its library."""
    lacking = GeneralTracker.unusable.__func__(tracker, os.environ)  # type: ignore[attr-defined]
    if lacking:
        raise MissingPluginError(f"The tracker {name_of(tracker)!r} cannot run: {lacking}.")
    if problem := _directory_problem(tracker, logging_dir):
        raise ConfigurationError(
            f"The tracker {name_of(tracker)!r} cannot run: {problem}. Pass a local directory as "
            "Accelerator(project_dir=...) or ProjectConfiguration(logging_dir=...)."
        )


def _directory_problem(
    tracker: type[GeneralTracker], logging_dir: str | os.PathLike[str] | None
) -> str | None:
    """Return why a tracker that writes to a directory has none, or None."""
    if tracker.requires_logging_directory is not True:
        return None
    if logging_dir is None:
        return "it needs a directory to write to, but no logging_dir is set"
    if "://" in os.fspath(logging_dir):
        return f"it writes to a local directory, but logging_dir is {os.fspath(logging_dir)!r}"
    return None


def _add_all(
    chosen: list[Asked], logging_dir: str | os.PathLike[str] | None, is_main: bool
) -> None:
    taken = {name_of(item) for item in chosen}
    for name in available_names():
        if name in taken:
            continue
        try:
            tracker = tracker_class(name)
            why = _directory_problem(tracker, logging_dir) or tracker.unusable(os.environ)
        except RAISED as error:
            why = f"{type(error).__name__}: {error}"
        if why is None:
            if tracker not in chosen:
                chosen.append(tracker)
        elif is_main:
            warn(f"log_with='all' skips the tracker {name!r}: {why}.")
    if not chosen:
        warn("log_with='all' found no usable tracker, so nothing is tracked.")


def name_of(item: Asked) -> str:
    """Return the name of a tracker, or the name of its class if it declares none."""
    name = getattr(item, "name", None)
    if isinstance(name, str):
        return str(name)
    cls = item if isinstance(item, type) else type(item)
    return cls.__name__


def is_for_every_rank(item: Asked, init_kwargs: InitKwargs) -> bool:
    """Return whether the tracker `item` runs on every rank, according to `init_kwargs` or its class."""
    declared = getattr(item, "main_process_only", True)
    wanted = init_kwargs.get(name_of(item), {}).get("main_process_only", declared)
    return wanted is False


def builder(
    item: Asked,
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    init_kwargs: InitKwargs,
    rank: int,
    size: int,
) -> Callable[[], GeneralTracker]:
    """Check the arguments of a tracker's constructor, and return a function that builds it.

    Raises:
        ConfigurationError: the constructor does not accept the arguments.
    """
    keywords = dict(init_kwargs.get(name_of(item), {}))
    keywords.pop("main_process_only", None)
    positional: tuple[Any, ...] = (project_name,)
    if isinstance(item, type) and item.requires_logging_directory is True:
        positional += (logging_dir,)
    # A class defined in the script is not a plugin, so it has no plugin settings.
    record = next((one for one in installed().of_kind("tracker") if one.loaded is item), None)
    if isinstance(item, type):
        settings = (None,) if record is not None and hasattr(item, "Settings") else ()
        _check_arguments(item, (*positional, *settings), keywords)

    def build() -> GeneralTracker:
        tracker: GeneralTracker
        if not isinstance(item, type):
            tracker = item
        elif record is None:
            tracker = item(*positional, **keywords)
        else:
            factory = PluginFactory(Sources.of(os.environ))
            tracker = factory.create(record, *positional, **keywords)
        if is_for_every_rank(item, init_kwargs):
            tracker.main_process_only = False
            tracker.run_group = RunGroup(_group_name(project_name), rank, size)
        return tracker

    return build


def _check_arguments(
    tracker: type[GeneralTracker], positional: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
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


def _group_name(project: str) -> str:
    """Return a name that is unique to this start and equal on all ranks, without communication."""
    parts = [os.environ.get(v, "") for v in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    return f"{project}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:8]}"
