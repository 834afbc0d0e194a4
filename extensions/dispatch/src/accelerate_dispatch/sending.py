"""Send the global steps that rank 0 reads, one step ahead."""

from __future__ import annotations

import logging
import random
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import NOTHING, Communicator, Item, Step, process_global
from accelerate_dispatch.prefetch import Prefetcher
from accelerate_dispatch.protocol import Channel, Message, sendable
from accelerate_dispatch.transport import SOURCE, CollectiveTransport, GroupTransport

logger = logging.getLogger(__name__)

# If the caller spends fewer seconds than this on a batch, switching to the thread costs more.
_WORTH_A_THREAD = 1e-4


def dispatch_steps(
    steps: Iterator[Step] | Exception | None,
    *,
    comm: Communicator,
    shard_of_rank: Sequence[int],
    group: dist.ProcessGroup | None = None,
    read_ahead: bool = True,
) -> Iterator[Item]:
    """Send the global steps that rank 0 reads, and yield this rank's part of each.

    Args:
        steps: the steps to send, or the exception that opening the data raised; None on the other
            ranks.
        comm: the ranks.
        shard_of_rank: for each rank the index of its part; ranks that train on the same samples
            have the same one.
        group: a process group of these ranks that nothing else uses. With it, the next message is
            in flight while the caller works on the current one. Without it, each step is one
            scatter that all ranks wait for.
        read_ahead: also read and send the next step on a thread. If reading draws from a global
            random generator, it stays on the caller's thread, because two threads that draw from
            one generator would make every run different.

    Raises:
        Exception: what reading raised on rank 0, on every rank.
        DispatchError: that exception cannot be pickled; on the other ranks.
    """
    observed = ObservedSteps(steps) if isinstance(steps, Iterator) else steps
    return Dispatch(observed, comm, shard_of_rank, group, read_ahead).items()


def _close_all(open_dispatches: weakref.WeakSet[Dispatch]) -> None:
    """Close what is still open before the process group ends: ending it under a transfer aborts."""
    for one in list(open_dispatches):
        try:
            one.close()
        except Exception as error:  # another rank may be gone; the group ends all the same
            logger.debug("closing %r before the process group ends: %s", one, error)


class ObservedSteps(Iterator[Step]):
    """Iterates over steps and notices whether reading them draws random numbers.

    Attributes:
        remaining: how many more steps to observe.
        draws: whether reading the step observed last used a global random number generator.
    """

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        # The first may draw the order of the epoch; the second shows what reading samples draws.
        self.remaining = 2
        self.draws = False

    def __next__(self) -> Step:
        if not self.remaining:
            return next(self._steps)
        before = _generators()
        step = next(self._steps)
        after = _generators()
        self.remaining -= 1
        self.draws = before[1:] != after[1:] or not torch.equal(before[0], after[0])
        return step


@dataclass(eq=False)
class Dispatch:
    """One epoch of a dispatched loader. See `dispatch_steps` for the arguments.

    With a group, every rank is exactly one message ahead of its caller. So if all ranks leave the
    loop at the same step, no message is left half sent.
    """

    steps: ObservedSteps | Exception | None
    comm: Communicator
    shard_of_rank: Sequence[int]
    group: dist.ProcessGroup | None
    read_ahead: bool

    def __post_init__(self) -> None:
        transport: CollectiveTransport | GroupTransport
        if self.group is None:
            transport = CollectiveTransport(self.comm)
        else:
            transport = GroupTransport(self.group)
        self._channel = Channel(transport, self.comm.size)
        self._reads = self.comm.rank == SOURCE
        self._outgoing = self._all_messages()
        self._ready: list[Message] | None = None
        self._prefetcher = Prefetcher(self._send, then=self._get_ready)
        self._awaited = False  # whether the other ranks are one message ahead of this one
        self._closed = False
        if self.group is not None:
            process_global("accelerate_dispatch.open", None, weakref.WeakSet, _close_all).add(self)

    def items(self) -> Iterator[Item]:
        """Yield this rank's part of every step in which it has one."""
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
        """End the iteration: wait for messages in flight, and leave no rank waiting."""
        if self._closed:
            return
        self._closed = True
        if self._awaited:
            self._prefetcher.rest()
            self._channel.send([Message() for _ in self.shard_of_rank])
        self._prefetcher.close()
        self._channel.close()
        # Explicitly, not by garbage collection: the loader's workers end with its iterator.
        self._outgoing.close()
        self._ready = None
        self.steps = None
        del self._prefetcher

    def _next(self) -> Message:
        if not self._reads:
            return self._channel.receive()
        self._awaited = False
        message: Message = self._prefetcher.take()
        return message

    def _begin_next(self, busy: bool) -> None:
        """Start the next message while the caller works on the current one."""
        if not self._reads:
            self._channel.expect()
            return
        draws = not isinstance(self.steps, ObservedSteps) or self.steps.draws
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
        """Read the step after the one just sent; no other rank notices yet."""
        self._ready = next(self._outgoing, None)

    def _all_messages(self) -> Generator[list[Message], None, None]:
        """Yield the messages of every step; an exception is sent in place of a step."""
        more = True
        shards = self.shard_of_rank
        try:
            if not isinstance(self.steps, ObservedSteps):
                raise self.steps or AssertionError("only the reading rank has steps")
            for step in self.steps:
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
