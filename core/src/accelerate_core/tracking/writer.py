"""One thread per tracker feeds its library: in order, and without the step waiting for it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from accelerate_core.tracking.entry import Entry
from accelerate_core.tracking.normalise import NotTaken, is_ill
from accelerate_core.tracking.tracker import GeneralTracker

__all__ = ["InlineWriter", "Writer", "drain"]

#: Entries handed to a library at once.
BATCH = 500
#: Seconds between two flushes of a library while values keep coming.
FLUSH_EVERY = 2.0
#: A writer rests this many times as long as a hand-over took, so that the training thread has the
#: interpreter most of the time: each operator of torch asks for it anew, and a thread that runs
#: Python without a break gives it up every 5 ms only.
REST = 3.0
LONGEST_REST = 0.25
#: Entries that may wait; beyond it a writer takes no rest.
BACKLOG = 5000
#: Seconds the last flush may go without any progress before a tracker is given up.
PATIENCE = 60.0
#: Entries in a row that a library may refuse before it is taken to be broken.
REFUSALS = 5

_Marker = threading.Event
_DRAWING = threading.Lock()


class Writer:
    """Feeds one tracker.

    Args:
        tracker: a started one.
        settle: completes an entry (waits for devices, journals it).
        mark: told the number of the last entry the tracker has flushed.
        failed: told the stage and the exception, once; nothing is delivered after that.
        refused: told the entry and the exception of one that the library did not take.
    """

    def __init__(
        self,
        tracker: GeneralTracker,
        settle: Callable[[Entry], None],
        mark: Callable[[str, int], None],
        failed: Callable[[GeneralTracker, str, Exception], None],
        refused: Callable[[GeneralTracker, Entry, Exception], None],
    ) -> None:
        self.tracker = tracker
        self.accepted = 0
        self.delivered = 0
        self.broken = False
        #: How many wait for this writer, which then takes no rest.
        self._awaited = 0
        self._takes_many = type(tracker).log_many is not GeneralTracker.log_many
        self._settle, self._mark, self._failed, self._refused = settle, mark, failed, refused
        self._in_a_row = 0
        self._next_step: dict[str, int] = {}
        self._queue: queue.SimpleQueue[Entry | _Marker | None] = queue.SimpleQueue()
        self._last = -1
        self._marked = -1
        self._flushed_at = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name=f"tracker-{self.tracker.name}", daemon=True
        )
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Take an entry; returns at once."""
        self.accepted += 1
        self._queue.put(entry)

    def request_flush(self) -> threading.Event:
        """Return an event that is set when all taken so far is delivered and flushed."""
        done = _Marker()
        self._awaited += 1
        self._queue.put(done)
        if not self._thread.is_alive():
            done.set()
        return done

    def stop(self, timeout: float) -> bool:
        """End the thread after what it was given; tell whether it ended in time."""
        self._awaited += 1
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is this writer."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            behind = self._marked < self._last and not self.broken
            wait = max(0.0, self._flushed_at + FLUSH_EVERY - time.monotonic()) if behind else None
            batch: list[Entry] = []
            marker: _Marker | None = None
            ended = False
            try:
                while len(batch) < BATCH:
                    item = self._queue.get(timeout=wait) if not batch else self._queue.get_nowait()
                    if item is None:
                        ended = True
                        break
                    if isinstance(item, _Marker):
                        marker = item
                        break
                    batch.append(item)
            except queue.Empty:
                pass
            self._deliver(batch)
            due = time.monotonic() - self._flushed_at >= FLUSH_EVERY
            if marker is not None or ended or due:
                self._flush()
            if marker is not None:
                self._awaited -= 1
                marker.set()
            if ended:
                return

    def _deliver(self, batch: list[Entry]) -> None:
        start = 0
        while start < len(batch) and not self.broken:
            stop = start
            while self._takes_many and stop < len(batch) and batch[stop].is_plain_log:
                stop += 1
            group = batch[start : max(stop, start + 1)]
            begun = time.perf_counter()
            for entry in group:
                if not entry.journaled:
                    self._settle(entry)
            self._try([entry for entry in group if not entry.refused])
            if self.broken:
                return
            self.delivered += len(group)
            self._last = group[-1].sequence
            start += len(group)
            if self.tracker.writes_through:
                self._marked = self._last
                self._mark(self.tracker.name, self._last)
            elif time.monotonic() - self._flushed_at >= FLUSH_EVERY:
                self._flush()  # what is delivered and not marked would come twice after a kill
            if not self._awaited and self._queue.qsize() < BACKLOG:
                time.sleep(min(REST * (time.perf_counter() - begun), LONGEST_REST))

    def _try(self, group: list[Entry]) -> None:
        """Hand over; an entry that the library refuses does not keep the others from it."""
        if not group:
            return
        try:
            self._hand_over(group)
        except Exception as error:
            if len(group) > 1:
                for entry in group:
                    if not self.broken:
                        self._try([entry])
                return
            if not isinstance(error, NotTaken):
                self._in_a_row += 1
            if is_ill(error) or self._in_a_row >= REFUSALS:
                # Not again after a resume either: it would switch the tracker off once more.
                self._last = group[0].sequence
                self._give_up(group[0].method, error)
            else:
                self._refused(self.tracker, group[0], error)
        else:
            self._in_a_row = 0

    def _hand_over(self, group: list[Entry]) -> None:
        first = group[0]
        if first.is_plain_log and self._takes_many:
            self.tracker.log_many([(dict(e.arguments), self._step(e)) for e in group])
            return
        step = self._step(first)
        keywords = dict((first.keywords or {}).get(self.tracker.name, {}))
        if first.verb == "log":
            values = dict(first.arguments)
            for key, value in (first.others or {}).items():
                if self.tracker.accepts(value):
                    values[key] = value
            self.tracker.log(values, step=step, **keywords)
        elif first.verb in self.tracker.supports:
            arguments = dict(first.arguments)
            if first.verb == "artifact":
                source = arguments.pop("source", None)
                if self.tracker.artifacts_in_place and source is not None:
                    arguments["path"] = source
            else:
                keywords["step"] = step
            if first.verb == "histogram" and not self.tracker.takes_not_finite:
                arguments["values"] = finite(arguments["values"])
            # Drawing changes a figure: two libraries must not draw the same one at once.
            with _DRAWING if first.verb == "figure" else contextlib.nullcontext():
                getattr(self.tracker, f"log_{first.verb}")(**arguments, **keywords)

    def _step(self, entry: Entry) -> int | None:
        """Return the step, counted on where the library needs one and none was given."""
        if not self.tracker.counts_steps or entry.verb == "artifact":
            return entry.step
        step = self._next_step.get(entry.verb, 0) if entry.step is None else entry.step
        self._next_step[entry.verb] = step + 1
        return step

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self.broken or self._marked == self._last:
            return
        try:
            safe = self.tracker.flush()
        except Exception as error:
            self._give_up("flush", error)
            return
        self._marked = self._last
        if safe is not False:
            self._mark(self.tracker.name, self._last)

    def _give_up(self, stage: str, error: Exception) -> None:
        self.broken = True
        if self._last > self._marked:
            self._mark(self.tracker.name, self._last)
        self._failed(self.tracker, stage, error)


class InlineWriter(Writer):
    """Feeds a tracker whose library is bound to the thread that made it: at the call."""

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    def put(self, entry: Entry) -> None:
        """Hand an entry over; the step waits."""
        self.accepted += 1
        self._awaited = 1  # no rest
        self._deliver([entry])

    def request_flush(self) -> threading.Event:
        """Flush, and return an event that is set."""
        self._flush()
        done = _Marker()
        done.set()
        return done

    def stop(self, timeout: float) -> bool:
        """Do nothing: there is no thread."""
        return True


def finite(values: Any) -> Any:
    """Return the finite ones of an array.

    Raises:
        NotTaken: there is none.
    """
    import numpy

    kept = values if values.dtype.kind not in "fc" else values[numpy.isfinite(values)]
    if kept.size == 0:
        raise NotTaken({"": "it has no finite value"})
    return kept


def drain(writers: list[Writer]) -> list[Writer]:
    """Wait until all is delivered; return those that made no progress for `PATIENCE` seconds.

    While it takes more than a second, a line on stderr says how far it is.
    """
    markers = [(writer, writer.request_flush()) for writer in writers]
    begun = moved = time.monotonic()
    seen = -1
    shown = False
    while any(not marker.is_set() for _, marker in markers):
        for _, marker in markers:
            if not marker.is_set():
                marker.wait(0.1)
                break
        now, done = time.monotonic(), sum(writer.delivered for writer in writers)
        if done != seen:
            seen, moved = done, now
        if now - moved > PATIENCE:
            break
        if now - begun > 1.0:
            shown = True
            _show(markers)
    if shown:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n")
    return [writer for writer, marker in markers if not marker.is_set()]


def _show(markers: list[tuple[Writer, Any]]) -> None:
    parts = [
        f"{writer.tracker.name} {writer.delivered}/{writer.accepted}"
        for writer, marker in markers
        if not marker.is_set()
    ]
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\rTrackers write what is left: {', '.join(parts)}   ")
        sys.stderr.flush()
