"""The next step is read and sent on a thread while the caller works on this one."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_core.data.dispatch.protocol import Channel, Message, sendable
from accelerate_core.data.dispatch.transport import SOURCE, CollectiveTransport, GroupTransport
from accelerate_core.data.steps import NOTHING, Item, Read, StepReader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import close_before_end

# Seconds of work on a batch below which handing over to the thread and back costs more.
_WORTH_A_THREAD = 1e-4


class Prefetcher:
    """Calls `make` on a thread of its own, one call at a time, one result ahead.

    After each result the thread calls `then`, which must not raise: to get ready for the next.

    `start` asks for the next result, `take` waits for it. `close` waits for what was started, so
    that nothing is under way afterwards, and ends the thread. The thread is a daemon: a run that
    dies does not wait for it.
    """

    def __init__(self, make: Callable[[], Any], then: Callable[[], None]) -> None:
        self._make = make
        self._then = then
        self._jobs: queue.Queue[Future[Any] | None] = queue.Queue()
        self._pending: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to make the next result."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)
            self._thread.start()
        self._pending = Future()
        self._jobs.put(self._pending)

    def take(self) -> Any:
        """Return the result that was started, or make it now; raise what making it raised."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            return pending.result()
        self.rest()
        return self._make()

    def rest(self) -> None:
        """Wait until the thread does nothing: what it uses may be used by the caller then."""
        self._jobs.join()

    def close(self) -> None:
        """Wait for what was started, drop it, and end the thread."""
        self._pending = None
        if self._thread is None or sys.is_finalizing():  # the thread runs no more by then
            return
        self._jobs.put(None)
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while True:
            result = self._jobs.get()
            if result is None:
                break
            try:
                result.set_result(self._make())
            except BaseException as error:
                result.set_exception(error)
            del result  # do not keep a batch alive while waiting
            try:
                self._then()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()


class Reading(Iterator[Read]):
    """Batches of a loader; notices who draws random numbers.

    `draws` says whether the last batch that was `watched` was read with the help of a global
    random number generator.
    """

    def __init__(self, items: Iterator[Read]) -> None:
        self._items = items
        self.watched = 0
        self.draws = False

    def __next__(self) -> Read:
        before = _generators() if self.watched else None
        item = next(self._items)
        if before is not None:
            self.watched -= 1
            after = _generators()
            self.draws = before[1:] != after[1:] or not torch.equal(before[0], after[0])
        return item


@dataclass(eq=False)
class Dispatch:
    """One iteration of a loader that rank 0 reads for all.

    Args:
        reader: arranges batches in global steps.
        reading: the open loader, or why it could not be opened; on the reading rank only.
        skip: batches of the loader to pass over.
        comm: the ranks.
        shard_of_rank: which part each rank gets; ranks that work on the same samples share one.
        group: a process group of these ranks that nobody else uses, or None. With it the message of the
            next step is under way while this one is worked on.
        read_ahead: read and send on a thread then. Reading that draws from the global random
            number generators is left to the caller's thread all the same: two threads that draw
            from one generator would make every run differ.

    With a group every rank is exactly one message ahead of its caller, so ranks that leave the loop
    at the same step leave nothing half sent behind.
    """

    reader: StepReader
    reading: Reading | Exception | None
    skip: int
    comm: Communicator
    shard_of_rank: Sequence[int]
    group: Any
    read_ahead: bool

    def __post_init__(self) -> None:
        ahead = self.group is not None
        transport = GroupTransport(self.group) if ahead else CollectiveTransport(self.comm)
        self._channel = Channel(transport, self.comm.size)
        self._reads = self.comm.rank == SOURCE
        self._outgoing = self._all_messages()
        self._ready: list[Message] | None = None
        self._prefetcher = Prefetcher(self._send, then=self._get_ready)
        self._awaited = False  # whether the other ranks are a message ahead of this one
        self._closed = False
        if ahead:
            close_before_end(self)

    def items(self) -> Iterator[Item]:
        """Yield this rank's part of every step of which it has one."""
        more = True
        busy = True
        try:
            while more and not self._closed:
                message = self._next()
                if message.failure is not None:
                    raise message.failure
                more = message.more
                if more and self.group is not None:
                    self._begin_next(busy)
                if message.part is not NOTHING:
                    began = time.perf_counter()
                    yield message.part, message.last, message.real, message.state
                    busy = time.perf_counter() - began > _WORTH_A_THREAD
        finally:
            self.close()

    def close(self) -> None:
        """End the iteration: wait for what is under way, and leave no rank waiting."""
        if self._closed:
            return
        self._closed = True
        if self._awaited:
            self._prefetcher.rest()
            self._channel.send([Message() for _ in self.shard_of_rank])
        self._prefetcher.close()
        self._channel.close()
        # At once, not when a collector comes by: a loader's workers end with its iterator.
        self._outgoing.close()
        self._ready = None
        self.reading = None
        del self._prefetcher

    def _next(self) -> Message:
        if not self._reads:
            return self._channel.receive()
        self._awaited = False
        message: Message = self._prefetcher.take()
        return message

    def _begin_next(self, busy: bool) -> None:
        """Let the next message be under way while the caller works on this one."""
        if not self._reads:
            self._channel.expect()
            return
        draws = not isinstance(self.reading, Reading) or self.reading.draws
        self._awaited = not (busy and self.read_ahead) or draws
        if not self._awaited:
            self._prefetcher.start()

    def _send(self) -> Message:
        messages = self._ready
        self._ready = None
        if messages is None:
            messages = next(self._outgoing)
        return self._channel.send(messages)

    def _get_ready(self) -> None:
        """Read the step after the one just sent; what is read shows to no other rank yet."""
        self._ready = next(self._outgoing, None)

    def _all_messages(self) -> Generator[list[Message], None, None]:
        """Yield the ranks' messages of every step; an exception takes the place of a step."""
        more = True
        reading = self.reading
        shards = self.shard_of_rank
        try:
            if not isinstance(reading, Reading):
                raise reading or AssertionError("only the reading rank has steps")
            # The first may draw the order of an epoch; by the second it shows what samples draw.
            reading.watched = 2
            for step in self.reader.steps(reading, self.skip):
                more = step.more
                parts = [(step.parts[shard], step.last[shard]) for shard in shards]
                yield [Message(part, last, more, step.real, step.state) for part, last in parts]
        except Exception as error:
            sent = Message(failure=sendable(error))
            yield [Message(failure=error)] + [sent] * (len(shards) - 1)
            return
        if more:
            yield [Message() for _ in shards]


def _generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state()[1:3] if numpy is not None else ((), 0)
    return torch.get_rng_state(), random.getstate(), bytes(state[0]), state[1]
