"""The four ways a prepared loader gets its batches. Each gives `(batch, last, real)`.

`last`: no batch follows. `real`: real samples of the global step if it was filled up, else None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from accelerate_core.collectives import Communicator
from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.dispatch import Transport, receive_steps
from accelerate_core.data.index import IndexStream
from accelerate_core.data.shard import ItemShard, IterableDatasetShard, Tagged
from accelerate_core.data.steps import NOTHING, StepReader

__all__ = ["DealtSource", "DispatchedSource", "IndexedSource", "Item", "Source", "StreamSource"]

Item = tuple[Any, bool, int | None]
_END: Any = object()


class Source(Protocol):
    """Batches of one rank.

    `per_step`: batches of the single-process loader that make one global step.
    """

    per_step: int
    even_batches: bool

    def start(self, batches: int, prime: bool) -> Iterator[Item]:
        """Begin an iteration `batches` (of the single-process loader) into the epoch.

        With `prime` the order is drawn before this returns.
        """

    def length(self) -> int:
        """Return the number of batches of a whole epoch; `TypeError` if it is not known."""


class IndexedSource:
    """A map-style loader that reads the indices of an `IndexStream`: nothing is read early."""

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

    def start(self, batches: int, prime: bool) -> Iterator[Item]:
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
    """A loader whose end shows only by reading on: it is read one batch ahead.

    `state` is the base loader's own state as it was before that.
    """

    def __init__(self, base: Any, per_step: int, stateful: bool) -> None:
        self.base = base
        self.per_step = per_step
        self.stateful = stateful
        self.state: Any = None

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

    def start(self, batches: int, prime: bool) -> Iterator[Item]:
        iterator = iter(self.base)
        for _ in range(batches // self.per_step):
            next(iterator, None)
        return self._items(iterator)

    def _items(self, iterator: Iterator[Any]) -> Iterator[Item]:
        batch = next(iterator, _END)
        while batch is not _END:
            state = self.base.state_dict() if self.stateful else None
            failure: Exception | None = None
            following = _END
            try:
                following = next(iterator, _END)
            except Exception as error:
                failure = error
            real = None
            if isinstance(batch, Tagged):
                size = batch_size_of(batch.batch) if batch.in_batches else 1
                real = None if size is None else batch.real * size
                batch = batch.batch
            self.state = state
            yield batch, failure is None and following is _END, real
            if failure is not None:
                raise failure
            batch = following


class DealtSource:
    """A loader of any class, which every rank reads whole and keeps its part of."""

    def __init__(self, base: Any, reader: StepReader, process_index: int) -> None:
        self.base = base
        self.reader = reader
        self.process_index = process_index
        self.per_step = 1 if reader.split_batches else reader.num_processes

    @property
    def even_batches(self) -> bool:
        return self.reader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.reader.even_batches = value

    def length(self) -> int:
        return steps_of(len(self.base), self.reader, self.process_index)

    def start(self, batches: int, prime: bool) -> Iterator[Item]:
        return self._items(iter(self.base), batches // self.per_step)

    def _items(self, iterator: Iterator[Any], skip: int) -> Iterator[Item]:
        for step in self.reader.steps(iterator, skip):
            part = step.parts[self.process_index]
            if part is not NOTHING:
                yield part, step.last[self.process_index], step.real


class DispatchedSource:
    """A loader that rank 0 reads for all."""

    def __init__(
        self,
        base: Any,
        stream: IndexStream | None,
        reader: StepReader,
        process_index: int,
        comm: Communicator,
        transport: Transport,
        shard_of_rank: Sequence[int],
    ) -> None:
        self.base = base
        self.stream = stream
        self.reader = reader
        self.process_index = process_index
        self.comm = comm
        self.transport = transport
        self.shard_of_rank = shard_of_rank
        self.per_step = 1 if reader.split_batches else reader.num_processes

    @property
    def even_batches(self) -> bool:
        return self.reader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.reader.even_batches = value

    def length(self) -> int:
        return steps_of(len(self.base), self.reader, self.process_index)

    def start(self, batches: int, prime: bool) -> Iterator[Item]:
        iterator: Iterator[Any] | None = None
        failure: Exception | None = None
        skip = batches // self.per_step
        if self.comm.rank == 0:
            if self.stream is not None:
                self.stream.start = batches
                self.stream.keep = self.per_step if self.reader.fills else 0
                # The batches kept for filling come first and are read over like skipped ones.
                skip = 1 if batches and self.stream.keep else 0
            try:
                iterator = iter(self.base)
                if prime and self.stream is not None and self.stream.latest is not None:
                    self.stream.latest.prime()
            except Exception as error:  # the others wait for the first message: tell them there
                failure = error

        def opened() -> Iterator[Any]:
            if failure is not None:
                raise failure
            assert iterator is not None
            return iterator

        return receive_steps(
            self.reader, opened, skip, self.comm, self.transport, self.shard_of_rank
        )


def steps_of(batches: int, reader: StepReader, process_index: int) -> int:
    """Return how many of the global steps made of so many batches have a part for this rank."""
    if reader.split_batches:
        return batches
    whole, rest = divmod(batches, reader.num_processes)
    if not rest or reader.drop_last:
        return whole
    return whole + (1 if reader.even_batches else int(process_index < rest))
