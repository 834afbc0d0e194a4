"""From one `log` call to every tracker: started, fed by writers, switched off, closed."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_core import crash
from accelerate_core.errors import ConfigurationError, TrackerError, did_you_mean, listing
from accelerate_core.tracking import media
from accelerate_core.tracking import writer as writing
from accelerate_core.tracking.choice import (
    Asked,
    Requested,
    choose,
    name_of,
    normalise_log_with,
)
from accelerate_core.tracking.ending import TooLongError, forbid_in_children, limited, watch
from accelerate_core.tracking.entry import DeviceRead, Entry
from accelerate_core.tracking.journal import (
    Journal,
    delete_leftover,
    hand_on_leftover,
    read_leftover,
)
from accelerate_core.tracking.messages import report_failure, whole, why_not
from accelerate_core.tracking.normalise import (
    NotTaken,
    Reporter,
    is_ill,
    normalise_config,
    normalise_values,
)
from accelerate_core.tracking.opening import builder, is_for_every_rank
from accelerate_core.tracking.staging import Staging
from accelerate_core.tracking.tracker import BlankTracker, GeneralTracker
from accelerate_core.tracking.writer import InlineWriter, Writer, drain

__all__ = ["Requested", "TrackerHub", "normalise_log_with"]

JOURNAL_FOLDER = ".tracking"

_logger = logging.getLogger(__name__)


class TrackerHub:
    """The trackers of one Accelerator.

    Which trackers run is decided here, at construction; they are built and
    started by `init`. With none asked for every method does nothing. On ranks
    other than the main one, trackers are blank unless `main_process_only` is
    False, in their class or among their `init_kwargs`.

    `log` and the verbs return at once: entries go to a journal on disk, and one
    thread per tracker feeds its library in order. A tracker that raises is named
    once in a warning, replaced by a blank one, and the run goes on.

    Args:
        requested: what `normalise_log_with` returned.
        logging_dir: handed to trackers that require a directory; the journal is there too.
        is_main_process: whether this rank is the main one.
        resolve: returns the class for a name, or raises `MissingPluginError`.
        available: the names `"all"` stands for, or a function that returns them,
            called only if `"all"` was asked for.
        rank, size: of this process in the world.

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
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.logging_dir = logging_dir
        self.is_main_process = is_main_process
        self.trackers: list[GeneralTracker] = []
        self._rank, self._size = rank, size
        self._reporter = Reporter()
        self._retired: list[GeneralTracker] = []
        self._writers: list[Writer] = []
        self._journal: Journal | None = None
        self._sequence = 0
        self._state = "new"
        self._resume: dict[str, Any] = {}
        self._begin: Callable[[], None] = lambda: None
        self._at_exit: Callable[[], None] | None = None
        self._staging = Staging(None)
        #: What was being handled when the run began, which is none of its failures.
        self._handled: int | None = None
        forbid_in_children(self)
        requested = list(requested)
        self._asked = choose(requested, logging_dir, is_main_process, resolve, available)

    @property
    def names(self) -> list[str]:
        """The names of the trackers asked for, those switched off included."""
        return [tracker.name for tracker in self.trackers] or [name_of(it) for it in self._asked]

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
            init_kwargs: per tracker name, further arguments of its constructor, and
                `main_process_only=False` to run it on every rank. Entries for
                trackers that were not asked for are left alone.

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
        kwargs = init_kwargs or {}
        here = [self.is_main_process or is_for_every_rank(item, kwargs) for item in self._asked]
        plain = self._plain_config(config) if any(here) else None
        builds = [
            builder(item, project_name, self.logging_dir, kwargs, (self._rank, self._size))
            if runs
            else partial(BlankTracker, name_of(item))
            for item, runs in zip(self._asked, here, strict=True)
        ]
        self._state = "open"
        error = sys.exc_info()[1]
        self._handled = None if error is None else id(error)

        def begin() -> None:
            self.trackers, self._retired = [], []
            for item, build in zip(self._asked, builds, strict=True):
                self._open(item, build, plain)
            self._feed()

        self._begin = begin
        begin()
        self._at_exit = watch(self)

    def _plain_config(self, config: object) -> dict[str, Any] | None:
        if config is None:
            return None
        try:
            return normalise_config(config, self._reporter)
        except TypeError as error:
            raise ConfigurationError(f"init_trackers(config=...): {error}") from None

    def _open(
        self, item: Asked, build: Callable[[], GeneralTracker], config: dict[str, Any] | None
    ) -> None:
        stage = "its constructor"
        try:
            tracker = build()
            if not isinstance(tracker, BlankTracker):
                tracker._is_main_process = self.is_main_process
                tracker.resume_id = self._resume.get("runs", {}).get(tracker.name)
                tracker.validate()
            stage = "start"
            tracker.start()
        except Exception as error:
            # One that never started has nothing to close.
            self.trackers.append(BlankTracker(name_of(item)))
            report_failure(item, stage, error)
            return
        self.trackers.append(tracker)
        if config is not None:
            try:
                tracker.store_init_configuration(dict(config))
            except Exception as error:
                report_failure(item, "store_init_configuration", error, off=is_ill(error))
                if is_ill(error):
                    self.trackers[-1] = BlankTracker(name_of(item))
                    self._retired.append(tracker)

    def _feed(self) -> None:
        """Open the journal, start the writers, and deliver what a crash left behind."""
        running = [tracker for tracker in self.trackers if not isinstance(tracker, BlankTracker)]
        self._sequence = 0
        self._writers = []
        if not running:
            return
        names = [tracker.name for tracker in running]
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        token = f"{stamp}-{secrets.token_hex(3)}"
        try:
            if self.logging_dir is not None:
                directory = Path(self.logging_dir) / JOURNAL_FOLDER
            else:
                directory = Path(tempfile.gettempdir()) / f"accelerate-tracking-{token}"
            self._staging = Staging(directory.absolute())
            self._journal = Journal(directory.absolute(), token, self._rank)
            self._journal.watch(names)
        except OSError as error:
            self._journal = None
            warnings.warn(f"Tracking goes on without a journal: {error}", stacklevel=4)
        for tracker in running:
            if any(type(it).__module__ == "sqlite3" for it in vars(tracker).values()):
                tracker.same_thread = True  # a connection serves the thread that made it
        self._writers = [
            (InlineWriter if tracker.same_thread else Writer)(
                tracker, self._settle, self._mark, self._writer_failed, self._refused
            )
            for tracker in running
        ]
        self._deliver_leftover()

    def _deliver_leftover(self) -> None:
        token, directory = self._resume.get("token"), self._resume.get("directory")
        if not token or not directory:
            return
        left = read_leftover(Path(directory), token, self._rank)
        for record in left.entries:
            names = [
                writer.tracker.name
                for writer in self._writers
                if record["n"] > left.have.get(writer.tracker.name, -1)
                and writer.tracker.name in record.get("o", (writer.tracker.name,))
            ]
            if names:
                self._take(Entry.from_record(self._next(), record), names)
        # It is in the new journal now, unless there is none.
        if self._journal is None:
            return
        if self._journal.directory == Path(directory):
            hand_on_leftover(Path(directory), token, self._rank, self._journal.token)
        else:
            delete_leftover(Path(directory), token, self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a checkpoint, so that a resumed script goes on in these runs.

        Only text: the runs' ids by tracker, and where the journal is.
        """
        if self._state != "open" or not self._writers:
            return {}
        runs: dict[str, str] = {}
        for tracker in self.trackers:
            try:
                found = None if isinstance(tracker, BlankTracker) else tracker.run_id
            except Exception:
                _logger.debug("asking %r for its run", tracker.name, exc_info=True)
                continue
            if found:
                runs[tracker.name] = str(found)
        state: dict[str, Any] = {"runs": runs}
        if self._journal is not None:
            state |= {"token": self._journal.token, "directory": str(self._journal.directory)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the runs of a checkpoint, and deliver what its script left undelivered.

        Best before `init_trackers`. After it, runs that were just opened and hold
        nothing yet are discarded for those of the checkpoint.
        """
        if not state or (self._journal is not None and state.get("token") == self._journal.token):
            return
        self._resume = dict(state)
        if self._state != "open":
            return
        if self._sequence:
            warnings.warn(
                "load_state came after values were logged: the trackers go on in the new run. "
                "Load before the first log to go on in the checkpoint's.",
                stacklevel=3,
            )
            return
        self._close_writers()
        self._close_journal(delete=True)
        for tracker in self.trackers:
            if not isinstance(tracker, BlankTracker):
                try:
                    tracker.discard() if tracker.resumes else tracker.finish()
                except Exception as error:
                    report_failure(tracker, "discard", error)
        self._begin()

    # --- logging ------------------------------------------------------------------------------

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
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
        if not self._asked:
            return
        if self._state != "open":
            self._refuse("log")
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"log takes a dict of names and values, not {type(values).__name__}."
            )
        step = whole(step)
        if not self._writers:
            return
        pending: dict[str, Any] = {}
        plain, other = normalise_values(values, self._reporter, pending)
        if other:
            other = self._accepted(other)
        if not plain and not other:
            return
        read = DeviceRead(pending).values if pending else None
        self._take(Entry(self._next(), "log", plain, step, log_kwargs, other, read))

    def _accepted(self, other: dict[str, object]) -> dict[str, object]:
        taken: dict[str, object] = {}
        for key, value in other.items():
            if any(writer.tracker.accepts(value) for writer in self._writers):
                taken[key] = value
            else:
                self._reporter.report(key, why_not(value))
        return taken

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        channels_first: bool = False,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log images by name; see `accelerate_core.tracking.media` for shapes and types."""
        if self._wanted("images"):
            arguments, read = media.images(values, channels_first)
            self._send("images", arguments, step, log_kwargs, read)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a table: `columns` with `data` (a list of rows), or a data frame."""
        if self._wanted("table"):
            arguments = media.table(table_name, columns, data, dataframe, self._reporter)
            self._send("table", arguments, step, log_kwargs)

    def log_figure(
        self,
        name: str,
        figure: Any,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a matplotlib figure; it must not be changed or closed before the trackers have it."""
        if self._wanted("figure"):
            self._send("figure", media.figure(name, figure), step, log_kwargs)

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Keep a file or directory with the run, as it is now: it is copied."""
        if self._wanted("artifact"):
            arguments = media.artifact(path, name)
            arguments["source"] = arguments["path"]
            arguments["path"] = self._staging.keep(arguments["path"])
            self._send("artifact", arguments, None, log_kwargs)

    def log_text(
        self,
        name: str,
        text: str,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a text."""
        if self._wanted("text"):
            self._send("text", media.text(name, text), step, log_kwargs)

    def log_histogram(
        self,
        name: str,
        values: Any,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the distribution of an array or tensor of any shape."""
        if self._wanted("histogram"):
            arguments, read = media.histogram(name, values)
            self._send("histogram", arguments, step, log_kwargs, read)

    def _wanted(self, verb: str) -> bool:
        """Tell whether a running tracker has the verb; name once those that have not."""
        if not self._asked:
            return False
        if self._state != "open":
            self._refuse(f"log_{verb}")
        without = [w.tracker.name for w in self._writers if verb not in w.tracker.supports]
        if without:
            self._reporter.note(
                f"log_{verb} is skipped by trackers that have no such thing: {listing(without)}."
            )
        return len(without) < len(self._writers)

    def _send(
        self,
        verb: str,
        arguments: dict[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None,
        read: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._take(Entry(self._next(), verb, arguments, whole(step), log_kwargs, None, read))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _take(self, entry: Entry, only: list[str] | None = None) -> None:
        if entry.is_complete:
            self._keep(entry, only)
        for writer in self._writers:
            if not writer.broken and (only is None or writer.tracker.name in only):
                writer.put(entry)

    def _settle(self, entry: Entry) -> None:
        try:
            if entry.resolve():
                self._keep(entry)
        except Exception as error:
            # What was logged is at fault, which could not be seen while it was on the device.
            self._reporter.report(entry.method, f"of {entry.keys}: {error}")

    def _refused(self, tracker: GeneralTracker, entry: Entry, error: Exception) -> None:
        """Say once per method and names what a tracker did not take; it goes on without it."""
        if isinstance(error, NotTaken):
            news = {
                k: p
                for k, p in error.problems.items()
                if self._reporter.first(f"{tracker.name}/{k}")
            }
            if news:
                report_failure(
                    tracker, f"{entry.method} of {entry.keys}", NotTaken(news), off=False
                )
            return
        what = f"{entry.method} of {entry.keys}"
        if self._reporter.first(f"{tracker.name}: {what}"):
            report_failure(tracker, what, error, off=False)

    def _keep(self, entry: Entry, only: list[str] | None = None) -> None:
        entry.journaled = True
        journal = self._journal
        record = entry.record() if journal is not None else None
        if journal is None or record is None:
            return
        if only is not None:
            record["o"] = only
        try:
            journal.append(entry.sequence, record)
        except (TypeError, ValueError):
            _logger.debug("entry %d is not journaled", entry.sequence, exc_info=True)
        except OSError as error:
            self._journal = None
            warnings.warn(f"Tracking goes on without its journal: {error}", stacklevel=5)

    def _mark(self, name: str, sequence: int) -> None:
        if self._journal is not None:
            try:
                self._journal.mark(name, sequence)
            except OSError as error:
                _logger.debug("the journal takes no more marks: %s", error)

    def _refuse(self, what: str) -> None:
        if self._state == "new":
            raise TrackerError(
                f"{what}: the trackers ({listing(self.names)}) are not started. "
                f"Call init_trackers(project_name) first."
            )
        if self._state == "forked":
            raise TrackerError(
                f"{what}: this process was forked while a run was open, which is its parent's. "
                f"Log there; a child has no thread that would write."
            )
        raise TrackerError(
            f"{what}: the run has ended. Log before end_training(), "
            f"or start a new run with init_trackers(project_name)."
        )

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of that name, or with `unwrap` its library's run object.

        On ranks where it does not run, if it was switched off, or if no tracker
        was asked for at all, the answer is a blank one that swallows every call.
        What is logged through it directly may overtake what `log` has queued; see `flush`.

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

    def flush(self) -> None:
        """Wait until every tracker has taken and flushed what was logged so far."""
        drain(self._writers)

    def is_failing(self) -> bool:
        """Tell whether an exception that came after `init` is being handled or on its way out."""
        error = sys.exc_info()[1]
        return crash.is_failure(error) and id(error) != self._handled

    def finish(self, failed: bool = False) -> None:
        """Deliver what is left and close the run; a second call, or one without a run, does nothing.

        Args:
            failed: the script raised; trackers that have a word for it mark the run so.
        """
        if self._state != "open":
            return
        self._state = "ended"
        self._resume = {}  # the next run is a new one
        if self._at_exit is not None:
            self._at_exit()
        stuck = self._close_writers()
        kept = bool(stuck)
        for tracker in self._retired:
            # What it took before it failed may still be written out.
            try:
                self._end(tracker, failed)
            except Exception:
                _logger.debug("closing the tracker %r", tracker.name, exc_info=True)
        self._retired = []
        # The last first: each has wrapped the streams and hooks that the ones before had wrapped.
        for tracker in reversed(list(self.trackers)):
            if tracker in stuck:
                continue
            try:
                self._end(tracker, failed)
            except Exception as error:
                kept = kept or isinstance(error, TooLongError)
                self._switch_off(tracker, "finish", error)
        # Only now: some libraries have nothing on disk before the end.
        self._close_journal(delete=not kept)

    def _end(self, tracker: GeneralTracker, failed: bool) -> None:
        end = tracker.finish_failed if failed else tracker.finish
        if isinstance(tracker, BlankTracker) or tracker.finishes_in_place or tracker.same_thread:
            end()
        else:
            limited(end, writing.PATIENCE, f"finish-{tracker.name}")

    def _close_writers(self) -> list[GeneralTracker]:
        stuck = drain(self._writers)
        for writer in self._writers:
            writer.stop(0.0 if writer in stuck else 5.0)
        where = self._journal.directory if self._journal is not None else "nowhere"
        for writer in stuck:
            warnings.warn(
                f"The tracker {writer.tracker.name!r} took {writer.delivered} of "
                f"{writer.accepted} entries and then made no progress; the rest is kept in {where} "
                f"and delivered when the run is resumed.",
                RuntimeWarning,
                stacklevel=4,
            )
        self._writers = []
        self._sequence = 0
        return [writer.tracker for writer in stuck]

    def _close_journal(self, delete: bool) -> None:
        if delete:
            self._staging.clear()  # a library that hangs may still be reading
        if self._journal is not None:
            self._journal.close(delete)
            self._journal = None

    def forked(self) -> None:
        """Let go of the run in a forked child: it is the parent's, and so are its threads."""
        if self._state != "open":
            return
        self._state = "forked"
        self._writers, self._journal, self._retired = [], None, []
        if self._at_exit is not None:
            self._at_exit()

    def _writer_failed(self, tracker: GeneralTracker, stage: str, error: Exception) -> None:
        self._retired.append(tracker)
        self._switch_off(tracker, stage, error)

    def _switch_off(self, tracker: GeneralTracker, stage: str, error: Exception) -> None:
        if tracker in self.trackers:
            self.trackers[self.trackers.index(tracker)] = BlankTracker(tracker.name)
        report_failure(tracker, stage, error)
