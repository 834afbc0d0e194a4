"""The four ways a prepared loader gets its batches. Each gives `(batch, last, real)`.

`last`: no batch follows. `real`: real samples of the global step if it was filled up, else None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.dispatch import SOURCE, Dispatch, Reading
from accelerate_core.data.index import IndexStream
from accelerate_core.data.shard import ItemShard, IterableDatasetShard
from accelerate_core.data.steps import NOTHING, Step, StepReader
from accelerate_core.data.tap import Tap
from accelerate_core.distributed.communicator import Communicator

__all__ = ["DealtSource", "DispatchedSource", "IndexedSource", "Item", "Source", "StreamSource"]

Item = tuple[Any, bool, int | None]
_END: Any = object()


class Source(Protocol):
    """Batches of one rank.

    `per_step`: batches of the single-process loader that make one global step. `keeps_state`: the
    data has a state of its own; `state` is then that after the batch handed out last.
    """

    per_step: int
    even_batches: bool
    state: Any

    @property
    def keeps_state(self) -> bool:
        """Whether the data has a state of its own that is known here."""

    def start(self, batches: int, prime: bool, state: Any = None) -> Iterator[Item]:
        """Begin an iteration `batches` (of the single-process loader) into the epoch.

        With `prime` the order is drawn before this returns. A `state` of the data's own goes
        before the count.
        """

    def length(self) -> int:
        """Return the number of batches of a whole epoch; `TypeError` if it is not known."""


class IndexedSource:
    """A map-style loader that reads the indices of an `IndexStream`: nothing is read early."""

    keeps_state = False
    state: Any = None

    def __init__(self, base: Any, stream: IndexStream, per_step: int) -> None:
        self.base = base
        self.stream = stream
        self.per_step = per_step

    @property
    def even_batches(self) -> bool:
        return bool(getattr(self.stream.plan, "even_batches", True))

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if self.per_step > 1 or hasattr(self.stream.plan, "even_batches"):
            self.stream.plan.even_batches = value

    def length(self) -> int:
        return len(self.stream)

    def start(self, batches: int, prime: bool, state: Any = None) -> Iterator[Item]:
        self.stream.start = batches
        iterator = iter(self.base)
        index = self.stream.latest
        assert index is not None
        if prime:
            index.prime()
        return self._items(iterator, index)

    def _items(self, iterator: Iterator[Any], index: Any) -> Iterator[Item]:
        for seen, batch in enumerate(iterator, 1):
            if index.exhausted and seen == index.count:
                yield batch, True, self._real(batch)
            else:
                yield batch, False, None

    def _real(self, batch: Any) -> int | None:
        plan = self.stream.plan
        tail: int | None = getattr(plan, "tail", None)
        if tail is None or not isinstance(plan, ItemShard):
            return tail
        size = batch_size_of(batch)
        return None if size is None else tail * size


class StreamSource:
    """A loader whose end shows only by reading on: it is read one batch ahead."""

    def __init__(self, base: Any, per_step: int) -> None:
        self.base = base
        self.per_step = per_step
        self.tap = Tap(base)
        self.state: Any = None

    @property
    def keeps_state(self) -> bool:
        return self.tap.keeps_state

    @property
    def even_batches(self) -> bool:
        return bool(getattr(self._shard(), "even_batches", True))

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        shard = self._shard()
        if shard is not None:
            shard.even_batches = value

    def _shard(self) -> IterableDatasetShard | None:
        dataset = getattr(self.base, "dataset", None)
        return dataset if isinstance(dataset, IterableDatasetShard) else None

    def length(self) -> int:
        return len(self.base)

    def start(self, batches: int, prime: bool, state: Any = None) -> Iterator[Item]:
        if state is not None:
            return self._items(self.tap.batches(state))
        shard = self._shard()
        if shard is not None and not getattr(self.base, "num_workers", 0):
            # Samples can be counted where one process reads them all, whatever the ranks were.
            shard.skip = batches * shard.batch_size
            return self._items(self.tap.batches())
        items = self.tap.batches()
        for _ in range(batches // self.per_step):
            next(items, None)
        return self._items(items)

    def _items(self, items: Iterator[tuple[Any, int | None, Any]]) -> Iterator[Item]:
        item = next(items, _END)
        while item is not _END:
            failure: Exception | None = None
            following = _END
            try:
                following = next(items, _END)
            except Exception as error:
                failure = error
            batch, real, self.state = item
            yield batch, failure is None and following is _END, real
            if failure is not None:
                raise failure
            item = following


class DealtSource:
    """A loader of any class, which every rank reads whole and keeps its part of."""

    def __init__(self, base: Any, reader: StepReader, process_index: int) -> None:
        self.base = base
        self.reader = reader
        self.process_index = process_index
        self.per_step = 1 if reader.split_batches else reader.num_processes
        self.tap = Tap(base)
        self.state: Any = None

    @property
    def keeps_state(self) -> bool:
        return self.tap.keeps_state

    @property
    def even_batches(self) -> bool:
        return self.reader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.reader.even_batches = value

    def length(self) -> int:
        return steps_of(len(self.base), self.reader, self.process_index)

    def start(self, batches: int, prime: bool, state: Any = None) -> Iterator[Item]:
        reading = Reading(self.tap.batches(state))
        skip = 0 if state is not None else batches
        return self._items(self.reader.steps(reading, skip, reading.state_now))

    def _items(self, steps: Iterator[Step]) -> Iterator[Item]:
        for step in steps:
            part = step.parts[self.process_index]
            if part is not NOTHING:
                self.state = step.state
                yield part, step.last[self.process_index], step.real


class DispatchedSource:
    """A loader that rank 0 reads for all. Only there is its state known."""

    def __init__(
        self,
        base: Any,
        stream: IndexStream | None,
        reader: StepReader,
        process_index: int,
        comm: Communicator,
        shard_of_rank: Sequence[int],
        read_ahead: bool = True,
    ) -> None:
        self.base = base
        self.stream = stream
        self.reader = reader
        self.process_index = process_index
        self.comm = comm
        self.shard_of_rank = shard_of_rank
        self.read_ahead = read_ahead
        self.per_step = 1 if reader.split_batches else reader.num_processes
        self.tap = Tap(base) if stream is None and comm.rank == SOURCE else None
        self.state: Any = None
        self._group: Any = None
        self._has_group = False

    @property
    def keeps_state(self) -> bool:
        return self.tap is not None and self.tap.keeps_state

    @property
    def even_batches(self) -> bool:
        return self.reader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.reader.even_batches = value

    def length(self) -> int:
        return steps_of(len(self.base), self.reader, self.process_index)

    def start(self, batches: int, prime: bool, state: Any = None) -> Iterator[Item]:
        if not self._has_group:  # made once all ranks iterate, and kept
            self._group, self._has_group = self.comm.open_group(), True
        reading: Reading | None = None
        failure: Exception | None = None
        skip = 0 if state is not None else batches
        if self.comm.rank == SOURCE:
            try:
                if self.stream is not None:
                    skip = self._aim(batches)
                    reading = Reading((batch, None, None) for batch in iter(self.base))
                    if self.stream.latest is not None:
                        # Before it is watched whether reading draws from the generators.
                        self.stream.latest.prime()
                elif self.tap is not None:
                    reading = Reading(self.tap.batches(state))
            except Exception as error:  # the others wait for the first message: tell them there
                failure = error

        def opened() -> Reading:
            if failure is not None:
                raise failure
            assert reading is not None
            return reading

        dispatch = Dispatch(
            self.reader,
            opened,
            skip,
            self.comm,
            self.shard_of_rank,
            group=self._group,
            read_ahead=self.read_ahead,
        )
        return self._items(dispatch)

    def _items(self, dispatch: Dispatch) -> Iterator[Item]:
        for letter in dispatch.letters():
            self.state = letter.state
            yield letter.part, letter.last, letter.real

    def _aim(self, batches: int) -> int:
        """Let the indices begin at a batch; return how many that come before it are passed over.

        What fills up the end of the epoch is read all the same, and comes first.
        """
        assert self.stream is not None
        self.stream.start = batches
        self.stream.keep = self.per_step if self.reader.fills else 0
        if not batches:
            return 0
        try:
            return min(self.stream.keep, len(self.stream))
        except TypeError:
            return self.stream.keep


def steps_of(batches: int, reader: StepReader, process_index: int) -> int:
    """Return how many of the global steps made of so many batches have a part for this rank."""
    if reader.split_batches:
        return batches
    whole, rest = divmod(batches, reader.num_processes)
    if not rest or reader.drop_last:
        return whole
    return whole + (1 if reader.even_batches else int(process_index < rest))
