"""`TrackerHub`: starts the trackers, sends each `log` call to all of them, and closes them."""

from __future__ import annotations

import logging
import operator
import os
import re
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accelerate_core.plugin import (
    ConfigurationError,
    LogKwargs,
    TrackerError,
    did_you_mean,
    is_failure,
    listing,
    warn,
)
from accelerate_tracking import tracker_threads
from accelerate_tracking.choice import (
    Asked,
    builder,
    choose,
    is_for_every_rank,
    name_of,
    normalise_log_with,
)
from accelerate_tracking.ending import TooLongError, limited, watch
from accelerate_tracking.media import ArtifactCopies, MediaVerbs, Payload
from accelerate_tracking.messages import report_failure, why_not
from accelerate_tracking.normalise import (
    RAISED,
    NotTaken,
    Reporter,
    is_broken,
    normalise_config,
    normalise_values,
)
from accelerate_tracking.tracker import BlankTracker, GeneralTracker
from accelerate_tracking.tracker_threads import (
    DeviceRead,
    InlineWriter,
    LogEntry,
    TrackerWriter,
    drain,
)

_logger = logging.getLogger(__name__)

_CLOSED = {
    "new": "the trackers ({names}) are not started. Call init_trackers(project_name) first.",
    "forked": "this process was forked while a run was open. The run belongs to the parent "
    "process, and the threads that write it don't exist here. Log in the parent process.",
    "ended": "the run has ended. Log before end_training(), or start a new run with "
    "init_trackers(project_name).",
}

#: Hubs with an open run, which forked children must drop.
_open_hubs: weakref.WeakSet[TrackerHub] = weakref.WeakSet()


#: A single part of a path. Drive letters and control characters are excluded, too.
_NAME = re.compile(r"[^/\\:\x00-\x1f]{1,255}")


class TrackerHub(MediaVerbs):
    """The trackers of one Accelerator. Implements `accelerate_core.contract.parts.Tracking`.

    The constructor chooses the trackers, and `init_trackers` builds and starts them. Ranks other
    than the main one get blank trackers, unless `main_process_only` is False in the class of the
    tracker or in its `init_kwargs`.

    `log` and the methods for media return at once. One thread per tracker passes the entries to
    its library in order, and flushes it every two seconds. If a tracker keeps failing, a warning
    names it, a blank tracker replaces it, and the run continues.

    Args:
        asked: the value of `log_with`: names, classes, instances, `"all"`.
        logging_dir: passed to trackers that require a directory.
        rank, size: rank of this process and number of processes.
        is_main: whether this rank is the main one.

    Raises:
        TypeError: `asked` has another type.
        MissingPluginError: a requested tracker is not installed.
        ConfigurationError: a requested tracker requires a directory, but none is set.
    """

    api_version = (1, 0)

    def __init__(
        self,
        asked: object,
        logging_dir: str | os.PathLike[str] | None = None,
        rank: int = 0,
        size: int = 1,
        is_main: bool = True,
    ) -> None:
        self.trackers: list[GeneralTracker] = []
        #: Tracker name -> id of its run in the checkpoint that was loaded.
        self.resumed_runs: dict[str, str] = {}
        self._asked = choose(normalise_log_with(asked), logging_dir, is_main)
        self._logging_dir = logging_dir
        self._rank = rank
        self._size = size
        self._is_main = is_main
        self._reporter = Reporter()
        self._artifacts = ArtifactCopies(logging_dir)
        self._state = "new"
        self._logged = False
        #: Tracker name -> id of the run to continue. Cleared at the end of the run.
        self._resume: dict[str, str] = {}
        self._start = ""
        self._openers: list[Callable[[], GeneralTracker]] = []
        self._writers: list[TrackerWriter] = []
        #: Trackers that were turned off after an error, and are not closed yet.
        self._retired: list[GeneralTracker] = []
        self._at_exit: Callable[[], None] | None = None
        #: The exception that was being handled when the run started. It is not a failure of the run.
        self._handled: int | None = None

    @property
    def names(self) -> list[str]:
        """The names of the requested trackers, including those that were turned off."""
        return [tracker.name for tracker in self.trackers] or [name_of(it) for it in self._asked]

    # --- starting a run -----------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: object = None, init_kwargs: LogKwargs = None
    ) -> None:
        """Build and start the trackers, and store the configuration with them.

        Args:
            project_name: the project under which the libraries group runs.
            config: see `normalise_config`. None stores nothing.
            init_kwargs: tracker name -> further arguments of its constructor, and
                `main_process_only=False` to run it on every rank.

        Raises:
            TrackerError: a run is already open.
            ConfigurationError: a tracker's constructor does not accept the arguments, or `config`
                has an unsupported type.
        """
        if not self._asked:
            return
        if self._state == "open":
            raise TrackerError(
                f"The trackers ({listing(self.names)}) are already started. Call init_trackers "
                "once per run. You can start a new run after end_training()."
            )
        kwargs = init_kwargs or {}
        here = [self._is_main or is_for_every_rank(item, kwargs) for item in self._asked]
        plain = None
        if config is not None and any(here):
            try:
                plain = normalise_config(config, self._reporter)
            except TypeError as error:
                raise ConfigurationError(f"init_trackers(config=...): {error}") from None
        self._openers = []
        for item, runs in zip(self._asked, here, strict=True):
            build: Callable[[], GeneralTracker] = partial(BlankTracker, name_of(item))
            if runs:
                directory = self._logging_dir
                place = (self._rank, self._size)
                build = builder(item, project_name, directory, kwargs, *place)
            self._openers.append(partial(self._open, item, build, plain))
        self._state = "open"
        handled = sys.exc_info()[1]
        self._handled = None if handled is None else id(handled)
        self._retired = []
        self._logged = False
        self._start = secrets.token_hex(4)
        self.trackers = [start() for start in self._openers]
        self._feed()
        self._at_exit = watch(self.finish)
        _open_hubs.add(self)

    def _open(
        self, item: Asked, build: Callable[[], GeneralTracker], config: dict[str, Any] | None
    ) -> GeneralTracker:
        """Return a started tracker, or a blank one if it cannot start."""
        stage = "its constructor"
        try:
            tracker = build()
            if not isinstance(tracker, BlankTracker):
                tracker._is_main_process = self._is_main
                tracker.resume_id = self._resume.get(tracker.name)
                tracker.validate()
            stage = "start"
            tracker.start()
        except RAISED as error:  # it never started, so it need not be closed
            report_failure(item, stage, error)
            return BlankTracker(name_of(item))
        if config is not None:
            try:
                tracker.store_init_configuration(dict(config))
            except RAISED as error:
                broken = is_broken(error)
                report_failure(item, "store_init_configuration", error, off=broken)
                if broken:
                    self._retired.append(tracker)
                    return BlankTracker(name_of(item))
        return tracker

    def _feed(self) -> None:
        """Start a writer for each running tracker."""
        self._writers = []
        for tracker in self.trackers:
            if isinstance(tracker, BlankTracker):
                continue
            own = [cls for cls in type(tracker).__mro__ if issubclass(cls, GeneralTracker)][:-1]
            declared = any("same_thread" in vars(cls) for cls in own)
            uses_sqlite = any(type(it).__module__ == "sqlite3" for it in vars(tracker).values())
            if uses_sqlite and not declared:
                tracker.same_thread = True
                self._reporter.note(
                    f"The tracker {tracker.name!r} has a sqlite3 connection, which usually only "
                    "works in the thread that created it, so `log` will wait for this tracker. Set "
                    "same_thread = True in its class to silence this warning, or False if the "
                    "connection was created with check_same_thread=False."
                )
            kind = InlineWriter if tracker.same_thread else TrackerWriter
            self._writers.append(kind(tracker, self._resolve, self._switch_off, self._refused))

    def state_dict(self) -> dict[str, Any]:
        """Return the ids of the runs by tracker, and an id of this start, for a checkpoint."""
        runs: dict[str, str] = {}
        for tracker in self.trackers if self._state == "open" else ():
            try:
                found = None if isinstance(tracker, BlankTracker) else tracker.run_id
            except RAISED:
                _logger.debug("run_id of the tracker %r failed", tracker.name, exc_info=True)
                continue
            if found:
                runs[tracker.name] = str(found)
        return {"runs": runs, "start": self._start} if runs else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the runs of a checkpoint. The current runs are discarded if they are empty."""
        runs = _plain_names(state.get("runs", {}))
        self.resumed_runs = runs
        if not runs or runs == self._resume or state.get("start") == self._start:
            return  # no runs to continue, or they are already being continued
        self._resume = runs
        if self._state != "open":
            return
        if self._logged:
            warn(
                "load_state was called after values were logged, so the trackers keep their new "
                "run. To continue the run of the checkpoint, load it before the first log.",
            )
            return
        self._stop_writers()
        for index, tracker in enumerate(self.trackers):
            if tracker.resumes and tracker.name in runs:
                try:
                    tracker.discard()
                except RAISED as error:
                    report_failure(tracker, "discard", error)
                open_again = self._openers[index]
                self.trackers[index] = open_again()
        self._feed()

    # --- logging ------------------------------------------------------------------------------

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: LogKwargs = None
    ) -> None:
        """Queue one set of values for every tracker, without waiting for any of them.

        Args:
            values: see `normalise_values`. A value that no tracker accepts causes a warning once
                per key. Tensors on a device are read later, by the writers.
            step: an integer of any library, or None.
            log_kwargs: tracker name -> further arguments of its `log`.

        Raises:
            TrackerError: no run is open.
            ConfigurationError: `values` is not a mapping, or `step` is not an integer.
        """
        if not self._is_open("log"):
            return
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"log needs a dict of names and values, not {type(values).__name__}."
            )
        step = _as_int(step)
        if not self._writers:
            return
        pending: dict[str, Any] = {}
        plain, other = normalise_values(values, self._reporter, pending)
        for key, value in list(other.items()):
            if not any(writer.tracker.accepts(value) for writer in self._writers):
                self._reporter.report(key, why_not(other.pop(key)))
        if plain or other:
            read = DeviceRead(pending).values if pending else None
            self._put(LogEntry("log", plain, step, log_kwargs, other, read))

    def _queue_media(
        self, verb: str, make: Callable[[], Payload], step: int | None, log_kwargs: LogKwargs
    ) -> None:
        if not self._is_open(f"log_{verb}"):
            return
        without = [w.tracker.name for w in self._writers if verb not in w.tracker.supports]
        if without:
            self._reporter.note(
                f"log_{verb} is skipped for trackers that do not support it: {listing(without)}."
            )
        if len(without) == len(self._writers):
            return
        made = make()
        arguments, read = ({}, made) if callable(made) else (made, None)
        if verb == "artifact":
            arguments["source"] = arguments["path"]
            arguments["path"] = self._artifacts.copy(arguments["path"])
        self._put(LogEntry(verb, arguments, _as_int(step), log_kwargs, None, read))

    def _put(self, entry: LogEntry) -> None:
        self._logged = True
        for writer in self._writers:
            if not writer.broken:
                writer.put(entry)

    def _resolve(self, entry: LogEntry) -> None:
        try:
            entry.resolve()
        except Exception as error:
            # The value is invalid, which was not visible while it was on the device.
            self._reporter.report(entry.method, f"of {entry.keys}: {error}")

    def _refused(self, tracker: GeneralTracker, entry: LogEntry, error: BaseException) -> None:
        """Warn once per method and names about entries that a tracker did not accept."""
        what = f"{entry.method} of {entry.keys}"
        if isinstance(error, NotTaken):
            problems = error.problems.items()
            news = {k: p for k, p in problems if self._reporter.first(f"{tracker.name}/{k}")}
            if news:
                report_failure(tracker, what, NotTaken(news), off=False)
        elif self._reporter.first(f"{tracker.name}: {what}"):
            report_failure(tracker, what, error, off=False)

    def _is_open(self, what: str) -> bool:
        """Return whether a run is open. Raise if it should be.

        If all trackers run on the main rank only, the other ranks need not call `init_trackers`.
        """
        if self._state == "open" or not self._asked:
            return bool(self._asked)
        everywhere = any(is_for_every_rank(one, {}) for one in self._asked)
        if self._state == "new" and not self._is_main and not everywhere:
            return False
        raise TrackerError(f"{what}: {_CLOSED[self._state].format(names=listing(self.names))}")

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with this name, or with `unwrap` the run object of its library.

        If the tracker does not run on this rank, was turned off, or no tracker was requested, this
        returns a blank one that ignores every call. Values that you log directly to the library
        may arrive before values that `log` has queued. See `flush_trackers`.

        Raises:
            TrackerError: `init_trackers` has not been called.
            ConfigurationError: no tracker has this name. It is also a ValueError.
        """
        name = str(name)
        if not self._asked:
            return BlankTracker(name)
        if name not in self.names:
            raise ConfigurationError(
                f"There is no tracker {name!r}. The trackers are {listing(self.names)}."
                f"{did_you_mean(name, self.names)}"
            )
        if self._state == "new" and not self._is_open("get_tracker"):
            return BlankTracker(name)
        tracker = next(tracker for tracker in self.trackers if tracker.name == name)
        if isinstance(tracker, BlankTracker):
            return tracker
        return tracker.tracker if unwrap else tracker

    # --- ending a run -------------------------------------------------------------------------

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has processed and flushed the values logged so far.

        A warning names trackers whose libraries don't guarantee that flushed values are on disk.

        Args:
            timeout: seconds. None waits as long as the trackers make progress.

        Returns:
            The names of the trackers that did not finish.
        """
        late = drain(self._writers, timeout)
        unsure = [w.tracker.name for w in self._writers if not (w.durable or w.broken or w in late)]
        if unsure and "jsonl" not in self.names:
            self._reporter.note(
                f"If this process is killed, {listing(unsure)} may lose values: its library only "
                "writes everything at the end of the run. To keep every value, add 'jsonl' to "
                "log_with."
            )
        return [writer.tracker.name for writer in late]

    def is_failing(self) -> bool:
        """Return whether an exception raised after `init_trackers` is currently propagating."""
        error = sys.exc_info()[1]
        return is_failure(error) and id(error) != self._handled

    def finish(self, failed: bool = False) -> None:
        """Deliver all queued entries and close the run. Does nothing if no run is open.

        Args:
            failed: whether the script raised. Trackers that support it mark the run as failed.
        """
        if self._state != "open":
            return
        self._end_run("ended")
        self._resume = {}  # the next init_trackers starts a new run
        stuck = self._stop_writers()
        hangs = bool(stuck)
        # Trackers that were turned off come first and may still write what they hold. The others
        # are closed in reverse order, because each has wrapped the streams and hooks of the
        # previous ones.
        for tracker in [*self._retired, *reversed(self.trackers)]:
            if tracker in stuck or isinstance(tracker, BlankTracker):
                continue
            close = tracker.finish_failed if failed else tracker.finish
            try:
                if tracker.finishes_in_place or tracker.same_thread:
                    close()
                else:
                    limited(close, tracker_threads.PATIENCE, f"finish-{tracker.name}")
            except RAISED as error:
                hangs = hangs or isinstance(error, TooLongError)
                if tracker in self._retired:
                    _logger.debug("closing the tracker %r", tracker.name, exc_info=True)
                else:
                    self._switch_off(tracker, "finish", error)
        self._retired = []
        if not hangs:  # a library that hangs may still be reading the copies
            self._artifacts.clear()

    def _end_run(self, state: str) -> None:
        self._state = state
        _open_hubs.discard(self)
        if self._at_exit is not None:
            self._at_exit()

    def _stop_writers(self) -> list[GeneralTracker]:
        """Deliver all queued entries and end the writers. Return the trackers that are stuck."""
        stuck = drain(self._writers, end=True)
        for writer in stuck:
            warn(
                f"The tracker {writer.tracker.name!r} received {writer.delivered} of "
                f"{writer.accepted} entries and then made no progress. It loses the rest.",
                RuntimeWarning,
            )
        self._writers = []
        return [writer.tracker for writer in stuck]

    def _switch_off(self, tracker: GeneralTracker, stage: str, error: BaseException) -> None:
        """Replace a tracker that raised by a blank one. `finish` closes it."""
        self._retired.append(tracker)
        if tracker in self.trackers:
            self.trackers[self.trackers.index(tracker)] = BlankTracker(tracker.name)
        report_failure(tracker, stage, error)


def _plain_names(runs: Any) -> dict[str, str]:
    """Return the runs of a checkpoint whose ids are single names, and warn about the others.

    A tracker may use the id as the name of a directory, and the author of a checkpoint must not choose
    where this run writes.
    """
    if not isinstance(runs, Mapping):
        return {}
    plain = {}
    for tracker, run in runs.items():
        if isinstance(run, str) and _NAME.fullmatch(run) and run not in (".", ".."):
            plain[str(tracker)] = run
        else:
            warn(
                f"The tracker {tracker!r} starts a new run: the checkpoint names the run {run!r}, and "
                "the name of a run cannot contain slashes."
            )
    return plain


def _as_int(step: Any) -> int | None:
    """Return a step as an int.

    Raises:
        ConfigurationError: it is not an integer.
    """
    if step is None or type(step) is int:
        return step
    try:
        if not isinstance(step, bool):
            return operator.index(step)
    except TypeError:
        pass
    raise ConfigurationError(
        f"log(step=...) must be an integer or None, not {step!r} ({type(step).__name__})."
    )


def _forked() -> None:
    """Drop the runs in a forked child. They belong to the parent, and so do their threads."""
    for hub in list(_open_hubs):
        hub._writers = []
        hub._retired = []
        hub._end_run("forked")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
