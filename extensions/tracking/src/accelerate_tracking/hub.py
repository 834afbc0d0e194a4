"""From one `log` call to every tracker: started, fed by writers, switched off, closed."""

from __future__ import annotations

import logging
import operator
import os
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
    is_ill,
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
    "forked": "this process was forked while a run was open, which is its parent's. Log there; a "
    "child has no thread that would write.",
    "ended": "the run has ended. Log before end_training(), or start a new run with "
    "init_trackers(project_name).",
}

#: Those with an open run, which a forked child is to let go of.
_open_hubs: weakref.WeakSet[TrackerHub] = weakref.WeakSet()


class TrackerHub(MediaVerbs):
    """The trackers of one Accelerator; implements `accelerate_core.contract.parts.Tracking`.

    Which trackers run is decided at construction; `init_trackers` builds and starts them. On ranks
    other than the main one they are blank unless `main_process_only` is False, in their class or
    among their `init_kwargs`.

    `log` and the verbs return at once: one thread per tracker feeds its library in
    order, and flushes it every other second. A tracker that raises is named once in
    a warning, replaced by a blank one, and the run goes on.

    Args:
        asked: what `log_with` has: names, classes, instances, `"all"`.
        logging_dir: handed to trackers that require a directory.
        rank, size: of this process in the world.
        is_main: whether this rank is the main one.

    Raises:
        TypeError: `asked` has something else.
        MissingPluginError: for a name that was asked for and is not installed.
        ConfigurationError: a tracker asked for by name or class requires a directory, and there
            is none.
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
        #: Ids of the trackers' runs of the checkpoint that was loaded, by tracker name.
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
        #: The runs to go on in; forgotten at the end of the run.
        self._resume: dict[str, str] = {}
        self._start = ""
        self._openers: list[Callable[[], GeneralTracker]] = []
        self._writers: list[TrackerWriter] = []
        #: Switched off by an error of theirs, and not closed yet.
        self._retired: list[GeneralTracker] = []
        self._at_exit: Callable[[], None] | None = None
        #: What was being handled when the run began, which is none of its failures.
        self._handled: int | None = None

    @property
    def names(self) -> list[str]:
        """The names of the trackers asked for, those switched off included."""
        return [tracker.name for tracker in self.trackers] or [name_of(it) for it in self._asked]

    # --- the life of a run --------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: object = None, init_kwargs: LogKwargs = None
    ) -> None:
        """Build and start the trackers, and hand them the configuration.

        Args:
            project_name: what the libraries group runs by.
            config: see `normalise_config`; None stores nothing.
            init_kwargs: per tracker name, further arguments of its constructor, and
                `main_process_only=False` to run it on every rank.

        Raises:
            TrackerError: a run is already open.
            ConfigurationError: a tracker's constructor does not take the arguments, or the config
                is none.
        """
        if not self._asked:
            return
        if self._state == "open":
            raise TrackerError(
                f"The trackers ({listing(self.names)}) are already started. Call init_trackers "
                f"once per run; after end_training() a new run can be started."
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
        """Return a started tracker, or a blank one in its place."""
        stage = "its constructor"
        try:
            tracker = build()
            if not isinstance(tracker, BlankTracker):
                tracker._is_main_process = self._is_main
                tracker.resume_id = self._resume.get(tracker.name)
                tracker.validate()
            stage = "start"
            tracker.start()
        except RAISED as error:  # one that never started has nothing to close
            report_failure(item, stage, error)
            return BlankTracker(name_of(item))
        if config is not None:
            try:
                tracker.store_init_configuration(dict(config))
            except RAISED as error:
                ill = is_ill(error)
                report_failure(item, "store_init_configuration", error, off=ill)
                if ill:
                    self._retired.append(tracker)
                    return BlankTracker(name_of(item))
        return tracker

    def _feed(self) -> None:
        """Start a writer for each tracker that runs."""
        self._writers = []
        for tracker in self.trackers:
            if isinstance(tracker, BlankTracker):
                continue
            own = [cls for cls in type(tracker).__mro__ if issubclass(cls, GeneralTracker)][:-1]
            said = any("same_thread" in vars(cls) for cls in own)
            if not said and any(type(it).__module__ == "sqlite3" for it in vars(tracker).values()):
                tracker.same_thread = True
                self._reporter.note(
                    f"The tracker {tracker.name!r} has a connection of sqlite3, which serves the "
                    "thread that made it: `log` waits for it. Let its class say same_thread = True, "
                    "or False if the connection was made with check_same_thread=False."
                )
            kind = InlineWriter if tracker.same_thread else TrackerWriter
            self._writers.append(kind(tracker, self._resolve, self._switch_off, self._refused))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed script needs: the runs' ids by tracker, and this start of them."""
        runs: dict[str, str] = {}
        for tracker in self.trackers if self._state == "open" else ():
            try:
                found = None if isinstance(tracker, BlankTracker) else tracker.run_id
            except RAISED:
                _logger.debug("asking %r for its run", tracker.name, exc_info=True)
                continue
            if found:
                runs[tracker.name] = str(found)
        return {"runs": runs, "start": self._start} if runs else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the runs of a checkpoint; runs that hold nothing yet are discarded for them."""
        runs = dict(state.get("runs", {}))
        self.resumed_runs = runs
        if not runs or runs == self._resume or state.get("start") == self._start:
            return  # there is none, or this one goes on already
        self._resume = runs
        if self._state != "open":
            return
        if self._logged:
            warn(
                "load_state came after values were logged: the trackers go on in the new run. "
                "Load before the first log to go on in the checkpoint's.",
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
        """Hand one set of values to every tracker, without waiting for any.

        Args:
            values: see `normalise_values`. What no tracker takes is reported once
                per key. Tensors of a device are read later, by the writers.
            step: a whole number of any library, or None.
            log_kwargs: per tracker name, further arguments of its `log`.

        Raises:
            TrackerError: no run is open.
            ConfigurationError: `values` is no mapping, or `step` no whole number.
        """
        if not self._is_open("log"):
            return
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"log takes a dict of names and values, not {type(values).__name__}."
            )
        step = _whole(step)
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

    def _hand_on(
        self, verb: str, make: Callable[[], Payload], step: int | None, log_kwargs: LogKwargs
    ) -> None:
        if not self._is_open(f"log_{verb}"):
            return
        without = [w.tracker.name for w in self._writers if verb not in w.tracker.supports]
        if without:
            self._reporter.note(
                f"log_{verb} is skipped by trackers that have no such thing: {listing(without)}."
            )
        if len(without) == len(self._writers):
            return
        made = make()
        arguments, read = ({}, made) if callable(made) else (made, None)
        if verb == "artifact":
            arguments["source"] = arguments["path"]
            arguments["path"] = self._artifacts.copy(arguments["path"])
        self._put(LogEntry(verb, arguments, _whole(step), log_kwargs, None, read))

    def _put(self, entry: LogEntry) -> None:
        self._logged = True
        for writer in self._writers:
            if not writer.broken:
                writer.put(entry)

    def _resolve(self, entry: LogEntry) -> None:
        try:
            entry.resolve()
        except Exception as error:
            # What was logged is at fault, which could not be seen while it was on the device.
            self._reporter.report(entry.method, f"of {entry.keys}: {error}")

    def _refused(self, tracker: GeneralTracker, entry: LogEntry, error: BaseException) -> None:
        """Say once per method and names what a tracker did not take; it goes on without it."""
        what = f"{entry.method} of {entry.keys}"
        if isinstance(error, NotTaken):
            problems = error.problems.items()
            news = {k: p for k, p in problems if self._reporter.first(f"{tracker.name}/{k}")}
            if news:
                report_failure(tracker, what, NotTaken(news), off=False)
        elif self._reporter.first(f"{tracker.name}: {what}"):
            report_failure(tracker, what, error, off=False)

    def _is_open(self, what: str) -> bool:
        """Tell whether a run is open; raise if there should be one.

        Scripts that call `init_trackers` on the main rank alone, where all trackers run, are right.
        """
        if self._state == "open" or not self._asked:
            return bool(self._asked)
        everywhere = any(is_for_every_rank(one, {}) for one in self._asked)
        if self._state == "new" and not self._is_main and not everywhere:
            return False
        raise TrackerError(f"{what}: {_CLOSED[self._state].format(names=listing(self.names))}")

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of that name, or with `unwrap` its library's run object.

        On ranks where it does not run, if it was switched off, or if no tracker
        was asked for at all, the answer is a blank one that swallows every call.
        What is logged through it directly may overtake what `log` has queued; see `flush_trackers`.

        Raises:
            TrackerError: `init_trackers` has not been called.
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
        if self._state == "new" and not self._is_open("get_tracker"):
            return BlankTracker(name)
        tracker = next(tracker for tracker in self.trackers if tracker.name == name)
        if isinstance(tracker, BlankTracker):
            return tracker
        return tracker.tracker if unwrap else tracker

    # --- the end ------------------------------------------------------------------------------

    def flush_trackers(self, timeout: float | None = None) -> list[str]:
        """Wait until every tracker has taken and flushed what was logged so far.

        Those whose libraries do not promise that it is on disk then are named once.

        Args:
            timeout: seconds; None waits for whom makes progress.

        Returns:
            Names of those that are not done.
        """
        late = drain(self._writers, timeout)
        unsure = [w.tracker.name for w in self._writers if not (w.durable or w.broken or w in late)]
        if unsure and "jsonl" not in self.names:
            self._reporter.note(
                f"What is logged is safe from a kill only at the end of the run with "
                f"{listing(unsure)}. To have every value after one, add 'jsonl' to log_with."
            )
        return [writer.tracker.name for writer in late]

    def is_failing(self) -> bool:
        """Tell whether an exception that came after `init_trackers` is being handled or on its way out."""
        error = sys.exc_info()[1]
        return is_failure(error) and id(error) != self._handled

    def finish(self, failed: bool = False) -> None:
        """Deliver what is left and close the run; a second call, or one without a run, does nothing.

        Args:
            failed: the script raised; trackers that have a word for it mark the run so.
        """
        if self._state != "open":
            return
        self._end_run("ended")
        self._resume = {}  # the next run is a new one
        stuck = self._stop_writers()
        hangs = bool(stuck)
        # What was switched off may still write out what it had taken. Then the last first: each
        # has wrapped the streams and hooks that the ones before had wrapped.
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
        if not hangs:  # a library that hangs may still be reading
            self._artifacts.clear()

    def _end_run(self, state: str) -> None:
        self._state = state
        _open_hubs.discard(self)
        if self._at_exit is not None:
            self._at_exit()

    def _stop_writers(self) -> list[GeneralTracker]:
        """Deliver what is left; return the trackers that are stuck."""
        stuck = drain(self._writers, end=True)
        for writer in stuck:
            warn(
                f"The tracker {writer.tracker.name!r} took {writer.delivered} of "
                f"{writer.accepted} entries and then made no progress; the rest is lost to it.",
                RuntimeWarning,
            )
        self._writers = []
        return [writer.tracker for writer in stuck]

    def _switch_off(self, tracker: GeneralTracker, stage: str, error: BaseException) -> None:
        """Put a blank tracker in the place of one that raised, and close that at the end."""
        self._retired.append(tracker)
        if tracker in self.trackers:
            self.trackers[self.trackers.index(tracker)] = BlankTracker(tracker.name)
        report_failure(tracker, stage, error)


def _whole(step: Any) -> int | None:
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


def _forked() -> None:
    """Let go of the runs in a forked child: they are the parent's, and so are their threads."""
    for hub in list(_open_hubs):
        hub._writers = []
        hub._retired = []
        hub._end_run("forked")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
