"""One writer thread per tracker, so that no training step waits for a tracking library."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate_tracking.normalise import RAISED, NotTaken, is_broken
from accelerate_tracking.tracker import GeneralTracker

if TYPE_CHECKING:
    import torch

#: Largest number of entries passed to a library at once.
BATCH = 500
#: Seconds from a value to the flush of its library, at most.
FLUSH_EVERY = 2.0
#: A writer rests this many times as long as a delivery took, so that the training thread has the
#: GIL most of the time. Each torch operator acquires the GIL again, and a thread that runs Python
#: without a pause releases it only every 5 ms.
REST = 3.0
LONGEST_REST = 0.25
#: With this many entries in the queue, a writer no longer rests.
BACKLOG = 5000
#: Seconds without progress in the last flush before a tracker is given up.
PATIENCE = 60.0
#: Seconds between two lines of progress when stderr is not a terminal.
SAY_EVERY = 10.0
#: Number of consecutive entries that a library may refuse before it counts as broken.
REFUSALS = 5

_DRAWING = threading.Lock()


class DeviceRead:
    """Copies one-element tensors from devices to the host without blocking.

    The copies are queued after the work that computes the values. `values` waits for them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        import torch  # already imported, because there are tensors

        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for key, tensor in tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), []).append(key)
        self._parts: list[tuple[list[str], torch.Tensor, torch.Event | None]] = []
        current = torch.accelerator.current_accelerator()
        for (device, _), keys in groups.items():
            # Stacking needs only one copy per device and dtype, and later in-place changes to the
            # tensors don't change the values.
            stacked = torch.stack([tensors[key].detach().reshape(()) for key in keys])
            if current is None or device.type != current.type:
                # Devices without streams may not support a second thread, so they are read now.
                self._parts.append((keys, stacked.cpu(), None))
                continue
            host = stacked.to("cpu", non_blocking=True)
            event = torch.accelerator.current_stream(device).record_event()
            self._parts.append((keys, host, event))

    def values(self) -> dict[str, Any]:
        """Wait for the copies and return the numbers."""
        found: dict[str, Any] = {}
        for keys, host, event in self._parts:
            if event is not None:
                event.synchronize()
            found.update(zip(keys, host.tolist(), strict=True))
        return found


class LogEntry:
    """One call of `log` or of a method for media.

    Values on a device are read only once, by the first writer that needs them.

    Args:
        verb: `log`, or the part of the method's name after `log_`.
        arguments: arguments of the tracker's method, or the values of `log`.
        step: the step, or None.
        keywords: tracker name -> further arguments.
        others: values of `log` that only some trackers accept.
        read: waits for a device and returns the missing arguments.
    """

    __slots__ = (
        "_lock", "_read", "arguments", "keywords", "others", "refused", "step", "verb",
    )  # fmt: skip

    def __init__(
        self,
        verb: str,
        arguments: dict[str, Any],
        step: int | None,
        keywords: Mapping[str, Mapping[str, Any]] | None = None,
        others: dict[str, object] | None = None,
        read: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.verb = verb
        self.arguments = arguments
        self.step = step
        self.keywords = keywords
        self.others = others
        self._read = read
        #: Whether the values from the device turned out to be invalid.
        self.refused = False
        self._lock = threading.Lock() if read is not None else None

    @property
    def method(self) -> str:
        """The name of the tracker's method."""
        return "log" if self.verb == "log" else f"log_{self.verb}"

    @property
    def keys(self) -> str:
        """The names in this entry, for warnings."""
        found = self.arguments
        if self.verb in ("log", "images"):
            named = found if self.verb == "log" else found.get("values", ())
            keys = [repr(key) for key in (*named, *(self.others or {}))]
            return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")
        return repr(found.get("name", found.get("table_name", "")))

    @property
    def is_plain_log(self) -> bool:
        """Whether the entry can be part of a call of `log_many`."""
        return self.verb == "log" and not self.keywords and not self.others

    def resolve(self) -> None:
        """Wait for values from a device. Raise, only once, if they are invalid."""
        if self._lock is None:
            return
        with self._lock:
            if self._read is not None:
                read = self._read
                self._read = None
                try:
                    self.arguments.update(read())
                except Exception:
                    self.refused = True
                    raise


class _Marker(threading.Event):
    """Set when everything queued before it has been delivered and flushed."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends


class TrackerWriter:
    """Delivers queued entries to one tracker.

    Args:
        tracker: a started tracker.
        resolve: completes an entry that waits for a device.
        failed: called once with the stage and the exception when the tracker is given up.
        refused: called with an entry that the library did not accept, and the exception.
    """

    #: Exceptions to handle. In our own thread, no exception is meant for the script.
    raised: tuple[type[BaseException], ...] = (BaseException,)

    def __init__(
        self,
        tracker: GeneralTracker,
        resolve: Callable[[LogEntry], None],
        failed: Callable[[GeneralTracker, str, BaseException], None],
        refused: Callable[[GeneralTracker, LogEntry, BaseException], None],
    ) -> None:
        self.tracker = tracker
        self.accepted = 0
        self.delivered = 0
        self.broken = False
        #: Whether flushed values survive a kill, according to the tracker's `flush`.
        self.durable = True
        self._resolve = resolve
        self._failed = failed
        self._refused = refused
        self._takes_many = type(tracker).log_many is not GeneralTracker.log_many
        self._in_a_row = 0
        self._next_step: dict[str, int] = {}
        self._flushed_at = time.monotonic()
        self._unflushed = False
        #: Set while another thread waits for this writer, which then does not rest.
        self._awaited = threading.Event()
        self._queue: queue.SimpleQueue[LogEntry | _Marker] = queue.SimpleQueue()
        self._begin()

    def _begin(self) -> None:
        name = f"tracker-{self.tracker.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, entry: LogEntry) -> None:
        """Queue an entry without waiting."""
        self.accepted += 1
        self._queue.put(entry)

    def request_flush(self, end: bool) -> threading.Event:
        """Return an event that is set when all queued entries have been delivered and flushed.

        Args:
            end: whether the thread ends after that.
        """
        done = _Marker(end)
        self._awaited.set()
        self._queue.put(done)
        if not self._thread.is_alive():
            done.set()
        return done

    def _run(self) -> None:
        marker: _Marker | None = None
        while marker is None or not marker.ends:
            batch, marker = self._collect()
            self._deliver(batch)
            if marker is not None:
                self._flush()
                self._awaited.clear()
                marker.set()
            elif not batch:
                self._flush()

    def _collect(self) -> tuple[list[LogEntry], _Marker | None]:
        """Wait for entries until a flush is due. Return the entries up to the next marker."""
        batch: list[LogEntry] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < BATCH:
                wait = None
                if self._unflushed and not batch:
                    wait = max(0.0, self._flushed_at + FLUSH_EVERY - time.monotonic())
                item = self._queue.get(not batch, wait)
                if isinstance(item, _Marker):
                    return batch, item
                batch.append(item)
        return batch, None

    def _deliver(self, batch: list[LogEntry]) -> None:
        start = 0
        while start < len(batch) and not self.broken:
            stop = start + 1
            if self._takes_many and batch[start].is_plain_log:
                while stop < len(batch) and batch[stop].is_plain_log:
                    stop += 1
            group = batch[start:stop]
            begun = time.perf_counter()
            for entry in group:
                self._resolve(entry)
            self._unflushed = True
            self._try([entry for entry in group if not entry.refused])
            if self.broken:
                return
            self.delivered += len(group)
            start = stop
            if time.monotonic() - self._flushed_at >= FLUSH_EVERY:
                self._flush()
            if self._queue.qsize() < BACKLOG:
                self._awaited.wait(min(REST * (time.perf_counter() - begun), LONGEST_REST))

    def _try(self, group: list[LogEntry]) -> None:
        """Call the library. If it refuses an entry, the other entries are still delivered."""
        if not group:
            return
        try:
            self._call_tracker(group)
        except self.raised as error:
            if len(group) > 1:
                for entry in group:
                    if not self.broken:
                        self._try([entry])
                return
            if not isinstance(error, NotTaken):
                self._in_a_row += 1
            if is_broken(error) or self._in_a_row >= REFUSALS:
                self._give_up(group[0].method, error)
            else:
                self._refused(self.tracker, group[0], error)
        else:
            self._in_a_row = 0

    def _call_tracker(self, group: list[LogEntry]) -> None:
        first, tracker = group[0], self.tracker
        if first.is_plain_log and self._takes_many:
            tracker.log_many([(dict(e.arguments), self._step(e)) for e in group])
            return
        step = self._step(first)
        keywords = dict((first.keywords or {}).get(tracker.name, {}))
        arguments = dict(first.arguments)
        if first.verb == "log":
            others = (first.others or {}).items()
            arguments |= {key: value for key, value in others if tracker.accepts(value)}
            tracker.log(arguments, step=step, **keywords)
        elif first.verb in tracker.supports:
            if first.verb == "artifact":
                source = arguments.pop("source")
                if tracker.artifacts_in_place:
                    arguments["path"] = source
            else:
                keywords["step"] = step
            if first.verb == "histogram" and not tracker.takes_not_finite:
                arguments["values"] = finite(arguments["values"])
            # Drawing modifies a figure, so two libraries must not draw it at the same time.
            with _DRAWING if first.verb == "figure" else contextlib.nullcontext():
                getattr(tracker, first.method)(**arguments, **keywords)

    def _step(self, entry: LogEntry) -> int | None:
        """Return the step of an entry, or the next one if the tracker counts steps."""
        if not self.tracker.counts_steps or entry.verb == "artifact":
            return entry.step
        step = self._next_step.get(entry.verb, 0) if entry.step is None else entry.step
        self._next_step[entry.verb] = step + 1
        return step

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self.broken or not self._unflushed:
            return
        self._unflushed = False
        try:
            self.durable = self.tracker.flush() is not False
        except self.raised as error:
            self._give_up("flush", error)

    def _give_up(self, stage: str, error: BaseException) -> None:
        self.broken = True
        self._failed(self.tracker, stage, error)


class InlineWriter(TrackerWriter):
    """Calls the tracker directly, for libraries that can only be used from one thread."""

    raised = RAISED

    def _begin(self) -> None:
        self._awaited.set()  # the step waits for each entry, so there is no rest

    def put(self, entry: LogEntry) -> None:
        """Deliver an entry at once, while the step waits."""
        self.accepted += 1
        self._deliver([entry])

    def request_flush(self, end: bool) -> threading.Event:
        """Flush, and return an event that is already set."""
        self._flush()
        done = threading.Event()
        done.set()
        return done


def finite(values: Any) -> Any:
    """Return the finite values of an array.

    Raises:
        NotTaken: there are none.
    """
    import numpy

    kept = values if values.dtype.kind not in "fc" else values[numpy.isfinite(values)]
    if kept.size == 0:
        raise NotTaken({"": "it has no finite value"})
    return kept


def drain(
    writers: Iterable[TrackerWriter], timeout: float | None = None, end: bool = False
) -> list[TrackerWriter]:
    """Wait until all entries are delivered and flushed. Return the writers that did not finish.

    If this takes more than a second, a line on stderr shows the progress. If stderr is not a
    terminal, it is repeated every ten seconds.

    Args:
        timeout: seconds. None waits until no writer has made progress for `PATIENCE` seconds.
        end: whether the threads of the writers end after that.
    """
    waiting = [(writer, writer.request_flush(end)) for writer in writers]
    patience = PATIENCE if timeout is None else timeout
    #: Start of the waiting time. Without a timeout, it is reset whenever a writer makes progress.
    begun = time.monotonic()
    since = begun
    say_at = begun + 1.0
    seen = -1
    terminal = _is_terminal()
    while waiting := [(writer, done) for writer, done in waiting if not done.is_set()]:
        waiting[0][1].wait(max(0.0, min(0.1, since + patience - time.monotonic())))
        now = time.monotonic()
        delivered = sum(writer.delivered for writer, _ in waiting)
        if timeout is None and delivered != seen:
            seen = delivered
            since = now
        if now - since > patience:
            break
        left = [writer for writer, done in waiting if not done.is_set()]
        if now > say_at and left:
            say_at = now if terminal else now + SAY_EVERY
            parts = [f"{one.tracker.name} {one.delivered}/{one.accepted}" for one in left]
            text = f"Waiting for trackers: {', '.join(parts)}"
            _say(f"\r{text}   " if terminal else f"{text}\n")
    if terminal and say_at != begun + 1.0:
        _say("\n")
    return [writer for writer, done in waiting if not done.is_set()]


def _is_terminal() -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is None or closed
        return sys.stderr.isatty()
    return False


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
