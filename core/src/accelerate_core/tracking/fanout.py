"""From one `log` call to every tracker: who was asked for, who runs, who was switched off."""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accelerate_core.errors import ConfigurationError, TrackerError, did_you_mean, listing
from accelerate_core.tracking.normalise import Reporter, normalise_config, normalise_values
from accelerate_core.tracking.tracker import BlankTracker, GeneralTracker

__all__ = ["Requested", "TrackerHub", "normalise_log_with"]

ALL = "all"

Requested = str | type[GeneralTracker] | GeneralTracker

_logger = logging.getLogger(__name__)


def normalise_log_with(log_with: object) -> list[Requested]:
    """Return what `log_with` asks for as a list of names, tracker classes and instances.

    Args:
        log_with: None, a name, a `LoggerType` or other string enum, a tracker
            class, an instance, or a list, tuple or set of those. `"all"` is kept
            as a name; what it stands for is decided by `TrackerHub`.

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


class TrackerHub:
    """The trackers of one Accelerator.

    Which trackers run is decided here, at construction; they are built and
    started by `init`. With none asked for every method does nothing. On ranks
    other than the main one, trackers are blank unless their class says
    `main_process_only = False`.

    A tracker that raises is named once in a warning, replaced by a blank one,
    and the run goes on.

    Args:
        requested: what `normalise_log_with` returned.
        logging_dir: handed to trackers that require a directory.
        is_main_process: whether this rank is the main one.
        resolve: returns the class for a name, or raises `MissingPluginError`.
        available: the names `"all"` stands for, or a function that returns them,
            called only if `"all"` was asked for.

    Raises:
        MissingPluginError: out of `resolve`, for a name that was asked for.
        ConfigurationError: a tracker asked for by name or class requires a
            logging directory and there is none.
    """

    def __init__(
        self,
        requested: Iterable[Requested],
        logging_dir: str | os.PathLike[str] | None,
        is_main_process: bool,
        resolve: Callable[[str], type[GeneralTracker]],
        available: Iterable[str] | Callable[[], Iterable[str]] = (),
    ) -> None:
        self.logging_dir = logging_dir
        self.is_main_process = is_main_process
        self.trackers: list[GeneralTracker] = []
        self._reporter = Reporter()
        self._retired: list[GeneralTracker] = []
        self._state = "new"
        requested = list(requested)
        self._asked = self._choose(requested, resolve)
        if ALL in requested:
            names = available() if callable(available) else available
            self._asked += self._expand_all(names, resolve)
            if not self._asked:
                warnings.warn(
                    "log_with='all' found no tracker that can be used here; nothing is tracked.",
                    stacklevel=2,
                )

    # --- who runs -----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of the trackers asked for, those switched off included."""
        return [tracker.name for tracker in self.trackers] or [_name(item) for item in self._asked]

    def _choose(
        self, requested: list[Requested], resolve: Callable[[str], type[GeneralTracker]]
    ) -> list[type[GeneralTracker] | GeneralTracker]:
        chosen: list[type[GeneralTracker] | GeneralTracker] = []
        for item in requested:
            if item == ALL:
                continue
            tracker = resolve(item) if isinstance(item, str) else item
            if isinstance(tracker, type):
                _check_class(tracker)
                if self._lacks_directory(tracker):
                    raise ConfigurationError(
                        f"The tracker {_name(tracker)!r} writes into a directory and none is "
                        f"given. Pass Accelerator(project_dir=...) or "
                        f"ProjectConfiguration(logging_dir=...)."
                    )
            elif self._runs_here(tracker):
                tracker.validate()
            if tracker not in chosen:
                chosen.append(tracker)
        return chosen

    def _expand_all(
        self, names: Iterable[str], resolve: Callable[[str], type[GeneralTracker]]
    ) -> list[type[GeneralTracker] | GeneralTracker]:
        taken = {_name(item) for item in self._asked}
        chosen: list[type[GeneralTracker] | GeneralTracker] = []
        for name in names:
            if name in taken:
                continue
            try:
                tracker = resolve(name)
                _check_class(tracker)
            except Exception as error:
                self._pass_over(name, f"{type(error).__name__}: {error}")
                continue
            if self._lacks_directory(tracker):
                self._pass_over(name, "it writes into a directory and no logging_dir is given")
            elif tracker not in self._asked:
                chosen.append(tracker)
        return chosen

    def _lacks_directory(self, tracker: type[GeneralTracker]) -> bool:
        return tracker.requires_logging_directory is True and self.logging_dir is None

    def _pass_over(self, name: str, why: str) -> None:
        if self.is_main_process:
            warnings.warn(f"log_with='all' passes over the tracker {name!r}: {why}.", stacklevel=4)

    def _runs_here(self, tracker: type[GeneralTracker] | GeneralTracker) -> bool:
        return self.is_main_process or getattr(tracker, "main_process_only", True) is False

    # --- the life of a run --------------------------------------------------------------------

    def init(
        self,
        project_name: str,
        config: object = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Build and start the trackers, and hand them the configuration.

        Args:
            project_name: what the libraries group runs by.
            config: see `normalise_config`; None stores nothing.
            init_kwargs: per tracker name, further arguments of its constructor.
                Entries for trackers that were not asked for are left alone.

        Raises:
            TrackerError: a run is already open.
            ConfigurationError: a tracker's constructor does not take the arguments,
                or the config is none.
        """
        if not self._asked:
            return
        if self._state == "open":
            raise TrackerError(
                f"The trackers ({listing(self.names)}) are already started. Call init_trackers "
                f"once per run; after end_training() a new run can be started."
            )
        plain = self._plain_config(config)
        builds = [self._prepare(item, project_name, init_kwargs or {}) for item in self._asked]
        self._state = "open"
        self.trackers = []
        self._retired = []
        for item, build in zip(self._asked, builds, strict=True):
            self._open(item, build, plain)

    def _plain_config(self, config: object) -> dict[str, Any] | None:
        if config is None or not any(self._runs_here(item) for item in self._asked):
            return None
        try:
            return normalise_config(config, self._reporter)
        except TypeError as error:
            raise ConfigurationError(f"init_trackers(config=...): {error}") from None

    def _prepare(
        self,
        item: type[GeneralTracker] | GeneralTracker,
        project_name: str,
        init_kwargs: Mapping[str, Mapping[str, Any]],
    ) -> Callable[[], GeneralTracker]:
        """Return how to get the tracker, with its arguments already checked."""
        name = _name(item)
        if not self._runs_here(item):
            return lambda: BlankTracker(name)
        if not isinstance(item, type):
            return lambda: item
        positional: tuple[Any, ...] = (project_name,)
        if item.requires_logging_directory is True:
            positional += (self.logging_dir,)
        keywords = dict(init_kwargs.get(name, {}))
        _check_arguments(item, positional, keywords)
        return lambda: item(*positional, **keywords)

    def _open(
        self,
        item: type[GeneralTracker] | GeneralTracker,
        build: Callable[[], GeneralTracker],
        config: dict[str, Any] | None,
    ) -> None:
        stage = "its constructor"
        tracker: GeneralTracker | None = None
        try:
            tracker = build()
            if not isinstance(tracker, BlankTracker):
                tracker._is_main_process = self.is_main_process
                tracker.validate()
            stage = "start"
            tracker.start()
            stage = "store_init_configuration"
            if config is not None:
                tracker.store_init_configuration(dict(config))
        except Exception as error:
            self.trackers.append(BlankTracker(_name(item)))
            _report_failure(item, stage, error)
            # One that never started has nothing to close.
            if tracker is not None and stage == "store_init_configuration":
                self._retired.append(tracker)
        else:
            self.trackers.append(tracker)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand one set of values to every tracker.

        Args:
            values: see `normalise_values`. What no tracker takes is reported once
                per key.
            step: a whole number of any library, or None.
            log_kwargs: per tracker name, further arguments of its `log`.

        Raises:
            TrackerError: no run is open.
            ConfigurationError: `values` is no mapping, or `step` no whole number.
        """
        if not self._asked:
            return
        if self._state != "open":
            self._refuse("log")
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"log takes a dict of names and values, not {type(values).__name__}."
            )
        step = _whole(step)
        if not any(not isinstance(tracker, BlankTracker) for tracker in self.trackers):
            return
        plain, other = normalise_values(values, self._reporter)
        taken: set[str] = set()
        for index, tracker in enumerate(self.trackers):
            if isinstance(tracker, BlankTracker):
                continue
            keywords = log_kwargs.get(tracker.name, {}) if log_kwargs else {}
            try:
                payload = (
                    {**plain, **self._accepted(tracker, other, taken)} if other else plain.copy()
                )
                tracker.log(payload, step=step, **keywords)
            except Exception as error:
                self._switch_off(index, "log", error)
        for key in other.keys() - taken:
            self._reporter.report(key, _why_not(other[key]))

    @staticmethod
    def _accepted(
        tracker: GeneralTracker, other: dict[str, object], taken: set[str]
    ) -> dict[str, object]:
        mine = {key: value for key, value in other.items() if tracker.accepts(value)}
        taken.update(mine)
        return mine

    def _refuse(self, what: str) -> None:
        if self._state == "new":
            raise TrackerError(
                f"{what}: the trackers ({listing(self.names)}) are not started. "
                f"Call init_trackers(project_name) first."
            )
        raise TrackerError(
            f"{what}: the run has ended. Log before end_training(), "
            f"or start a new run with init_trackers(project_name)."
        )

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of that name, or with `unwrap` its library's run object.

        On ranks where it does not run, if it was switched off, or if no tracker
        was asked for at all, the answer is a blank one that swallows every call.

        Raises:
            TrackerError: `init` has not been called.
            ConfigurationError (a ValueError): no tracker has that name.
        """
        name = str(name)
        if not self._asked:
            return BlankTracker(name)
        if name not in self.names:
            raise ConfigurationError(
                f"There is no tracker {name!r}; there is {listing(self.names)}."
                f"{did_you_mean(name, self.names)}"
            )
        if self._state == "new":
            self._refuse("get_tracker")
        tracker = next(tracker for tracker in self.trackers if tracker.name == name)
        if isinstance(tracker, BlankTracker):
            return tracker
        return tracker.tracker if unwrap else tracker

    def finish(self, failed: bool = False) -> None:
        """Close the run; a second call, or one without a run, does nothing.

        Args:
            failed: the script raised; trackers that have a word for it mark the run so.
        """
        if self._state != "open":
            return
        self._state = "ended"
        for tracker in self._retired:
            # What it took before it failed may still be written out.
            try:
                tracker.finish_failed() if failed else tracker.finish()
            except Exception:
                _logger.debug("closing the tracker %r", tracker.name, exc_info=True)
        self._retired = []
        for index, tracker in enumerate(self.trackers):
            try:
                tracker.finish_failed() if failed else tracker.finish()
            except Exception as error:
                self._switch_off(index, "finish", error)

    def _switch_off(self, index: int, stage: str, error: Exception) -> None:
        tracker = self.trackers[index]
        self.trackers[index] = BlankTracker(tracker.name)
        if stage == "log":
            self._retired.append(tracker)
        _report_failure(tracker, stage, error)


def _name(item: type[GeneralTracker] | GeneralTracker) -> str:
    name = getattr(item, "name", None)
    if isinstance(name, str):
        return str(name)
    return (item if isinstance(item, type) else type(item)).__name__


def _check_class(tracker: type[GeneralTracker]) -> None:
    if not (isinstance(tracker, type) and issubclass(tracker, GeneralTracker)):
        raise TrackerError(f"{tracker!r} is offered as a tracker but is no GeneralTracker class.")


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
            f"init_trackers cannot build the tracker {_name(tracker)!r}: {error}. "
            f"{tracker.__qualname__} takes {signature}."
            f"{did_you_mean(wrong, signature.parameters) if wrong else ''}"
        ) from None


def _whole(step: Any) -> int | None:
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


def _why_not(value: object) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    if shape is not None:
        what = f"is a {kind} of shape {tuple(shape)}; log takes single numbers and strings"
        return f"{what}: reduce it first, or use get_tracker(name) for media"
    return f"is a {kind}, which no tracker takes; log takes numbers, strings and dicts of them"


def _report_failure(
    tracker: type[GeneralTracker] | GeneralTracker, stage: str, error: Exception
) -> None:
    name = _name(tracker)
    _logger.debug("tracker %r raised in %s", name, stage, exc_info=error)
    owner = _distribution(tracker if isinstance(tracker, type) else type(tracker))
    warnings.warn(
        f"The tracker {name!r}{owner} raised in {stage} and is switched off; the run goes on. "
        f"{type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=4,
    )


def _distribution(cls: type) -> str:
    """Return ` (distribution and version)` of the package a class comes from, if it is known."""
    package = cls.__module__.partition(".")[0]
    try:
        found = importlib.metadata.packages_distributions().get(package, [])
        return "".join(f" ({each} {importlib.metadata.version(each)})" for each in found[:1])
    except Exception:
        return ""
