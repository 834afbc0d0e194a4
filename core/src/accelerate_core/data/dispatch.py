"""Dispatching: one rank reads, every rank receives its part, one step ahead."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from accelerate_core.data.ahead import OneAhead
from accelerate_core.data.steps import NOTHING, Step, StepReader
from accelerate_core.data.wire import (
    SOURCE,
    CommPost,
    DispatchError,
    GroupPost,
    Letter,
    Wire,
    sendable,
)
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import close_before_end

__all__ = ["SOURCE", "Dispatch", "DispatchError", "Reading"]

_END: Any = object()
# Seconds of work on a batch below which handing over to the thread and back costs more.
_WORTH_A_THREAD = 1e-4


class Reading(Iterator[Any]):
    """Batches out of `(batch, real, state)`; knows the loader's state after the latest.

    `draws` says whether the last batch that was `watched` was read with the help of a global
    random number generator.
    """

    def __init__(self, items: Iterator[tuple[Any, int | None, Any]]) -> None:
        self._items = items
        self._state: Any = None
        self.watched = 0
        self.draws = False

    def __next__(self) -> Any:
        if self.watched:
            self.watched -= 1
            before = _generators()
            batch, _, self._state = next(self._items)
            self.draws = not _same(before, _generators())
        else:
            batch, _, self._state = next(self._items)
        return batch

    def state_now(self) -> Any:
        """Return the loader's state after the batch read last, if it has one."""
        return self._state


class Dispatch:
    """One iteration of a loader that rank 0 reads for all.

    Args:
        reader: arranges batches in global steps.
        opened: returns the open loader; called on the reading rank only.
        skip: batches of the loader to pass over.
        comm: the ranks.
        shard_of_rank: which part each rank gets; ranks that work on the same samples share one.
        group: a process group of these ranks that nobody else uses. With it the letter of the
            next step is under way while this one is worked on.
        read_ahead: read and send on a thread then. Reading that draws from the global random
            number generators is left to the caller's thread all the same: two threads that draw
            from one generator would make every run differ.

    With a group every rank is exactly one letter ahead of its caller, so ranks that leave the loop
    at the same step leave nothing half sent behind.
    """

    def __init__(
        self,
        reader: StepReader,
        opened: Callable[[], Reading],
        skip: int,
        comm: Communicator,
        shard_of_rank: Sequence[int],
        *,
        group: Any = None,
        read_ahead: bool = True,
    ) -> None:
        self._wire = Wire(CommPost(comm) if group is None else GroupPost(group), comm.size)
        self._reader = reader
        self._opened = opened
        self._skip = skip
        self._shard_of_rank = shard_of_rank
        self._ahead = group is not None
        self._read_ahead = read_ahead
        self._reads = comm.rank == SOURCE
        self._reading: Reading | None = None
        self._steps = self._guarded()
        self._ready: list[Letter] | None = None
        self._worker = OneAhead(self._send, "dispatch", then=self._get_ready)
        self._awaited = False  # whether the other ranks are a letter ahead of this one
        self._closed = False

    def letters(self) -> Iterator[Letter]:
        """Yield this rank's letter of every step of which it has a part."""
        if self._ahead:
            close_before_end(self)
        return self._sent() if self._reads else self._received()

    def close(self) -> None:
        """End the iteration: wait for what is under way, and leave no rank waiting."""
        if self._closed:
            return
        self._closed = True
        if not self._reads:
            self._wire.close()
            return
        if self._awaited:
            self._worker.rest()
            self._wire.send([Letter() for _ in self._shard_of_rank])
        self._worker.close()
        self._wire.close()
        # At once, not when a collector comes by: a loader's workers end with its iterator.
        self._steps.close()
        self._ready = self._reading = None
        del self._opened, self._worker

    def _received(self) -> Iterator[Letter]:
        more = True
        try:
            while more and not self._closed:
                letter = self._wire.receive()
                if letter.failure is not None:
                    raise letter.failure
                more = letter.more
                if more and self._ahead:
                    self._wire.expect()
                if letter.has_part:
                    yield letter
        finally:
            self.close()

    def _sent(self) -> Iterator[Letter]:
        worker = self._worker
        more = busy = True
        try:
            while more and not self._closed:
                self._awaited = False
                if worker.started:
                    letter = worker.take()
                else:
                    worker.rest()
                    letter = self._send()
                if letter.failure is not None:
                    raise letter.failure
                more = letter.more
                if more and self._ahead:
                    if busy and self._may_go_ahead():
                        worker.start()
                    else:
                        self._awaited = True
                if letter.has_part:
                    began = time.perf_counter()
                    yield letter
                    busy = time.perf_counter() - began > _WORTH_A_THREAD
        finally:
            self.close()

    def _may_go_ahead(self) -> bool:
        return self._read_ahead and self._reading is not None and not self._reading.draws

    def _send(self) -> Letter:
        letters, self._ready = self._ready, None
        if letters is None:
            letters = _letters(next(self._steps), self._shard_of_rank)
        return self._wire.send(letters)

    def _get_ready(self) -> None:
        """Read the step after the one just sent; what is read shows to no other rank yet."""
        step = next(self._steps, _END)
        if step is not _END:
            self._ready = _letters(step, self._shard_of_rank)

    def _guarded(self) -> Generator[Step | Exception | None, None, None]:
        """Yield steps, an exception in the place of the step it prevented, None for no data."""
        more = True
        try:
            self._reading = self._opened()
            # The first may draw the order of an epoch; by the second it shows what samples draw.
            self._reading.watched = 2
            steps = self._reader.steps(self._reading, self._skip, self._reading.state_now)
            for step in steps:
                more = step.more
                yield step
        except Exception as error:
            yield error
            return
        if more:
            yield None


def _generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state()[1:3] if numpy is not None else ((), 0)
    return torch.get_rng_state(), random.getstate(), bytes(state[0]), state[1]


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return before[1:] == after[1:] and torch.equal(before[0], after[0])


def _letters(step: Step | Exception | None, shard_of_rank: Sequence[int]) -> list[Letter]:
    if step is None:
        return [Letter() for _ in shard_of_rank]
    if isinstance(step, Exception):
        copy = sendable(step)
        own = Letter(failure=step)
        return [
            own if rank == SOURCE else Letter(failure=copy) for rank in range(len(shard_of_rank))
        ]
    letters = []
    for shard in shard_of_rank:
        part = step.parts[shard]
        has_part = part is not NOTHING
        letters.append(
            Letter(
                part if has_part else None,
                has_part,
                step.last[shard],
                step.more,
                step.real,
                state=step.state,
            )
        )
    return letters
