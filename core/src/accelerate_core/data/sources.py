"""The four ways a prepared loader gets its batches. Each gives `(batch, last, real)`.

`last`: no batch follows. `real`: real samples of the global step if it was filled up, else None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.dispatch.prefetch import Dispatch, Reading
from accelerate_core.data.dispatch.transport import SOURCE
from accelerate_core.data.order import Wrapper, iterate_from
from accelerate_core.data.resumable import ResumableReader
from accelerate_core.data.shard import ItemShard, IterableDatasetShard
from accelerate_core.data.steps import NOTHING, Step, StepReader
from accelerate_core.distributed.communicator import Communicator

Item = tuple[Any, bool, int | None]
_END: Any = object()


class IndexStream(Wrapper):
    """Stands in a loader's place of the batch sampler (or sampler).

    Args:
        plan: yields this rank's batches; `plan.iterate(start)` is used to skip if it exists.

    `start` is where the next iteration begins, in batches of the single-process loader. With
    `keep` the first so many batches are given all the same, before those from `start` on: who
    fills up the end of the epoch needs them.
    """

    own_names = ("plan", "state_dict", "load_state_dict")

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.start = 0
        self.keep = 0
        self.latest: IndexIterator | None = None

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> IndexIterator:
        self.latest = IndexIterator(self.plan, self.start, self.keep)
        return self.latest


class IndexIterator(Iterator[Any]):
    """One iteration: `count` batches were taken, `exhausted` says that none is left.

    It looks one batch of *indices* ahead, so the last batch is known without loading anything
    early. Nothing is drawn before the first batch is asked for: PyTorch seeds its workers before
    that, and the order of draws from the global generator must stay PyTorch's.
    """

    def __init__(self, plan: Any, start: int, keep: int) -> None:
        self.plan = plan
        self.start = start
        self.keep = keep
        self.count = 0
        self.exhausted = False
        self._batches: Iterator[Any] | None = None
        self._next: Any = None

    def draw(self) -> None:
        """Draw the order now, and go to the start."""
        if self._batches is None:
            if hasattr(type(self.plan), "iterate"):
                self._batches = iter(self.plan.iterate(self.start))
            else:
                self._batches = iterate_from(self.plan, self.start, self.keep)
            self._next = next(self._batches, _END)
            self.exhausted = self._next is _END

    def __next__(self) -> Any:
        if self._batches is None:
            self.draw()
        batch = self._next
        if batch is _END:
            raise StopIteration
        self._next = next(self._batches, _END)  # type: ignore[arg-type]
        self.exhausted = self._next is _END
        self.count += 1
        return batch


class Source:
    """Batches of one rank.

    Args:
        base: a copy of the user's loader.
        per_step: batches of the single-process loader that make one global step.
        filler: fills up the end of the epoch according to its `even_batches`, if it has one.

    `state` is that of the data after the batch handed out last, where it has one of its own.
    """

    state: Any = None

    def __init__(self, base: Any, per_step: int, filler: Any) -> None:
        self.base = base
        self.per_step = per_step
        self.filler = filler

    @property
    def even_batches(self) -> bool:
        """Whether the last global step is filled up."""
        return bool(getattr(self.filler, "even_batches", True))

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if hasattr(self.filler, "even_batches"):
            self.filler.even_batches = value

    def length(self) -> int:
        """Return the number of batches of a whole epoch; `TypeError` if it is not known."""
        return len(self.base)

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        """Begin an iteration `batches` (of the single-process loader) into the epoch.

        With `draw` the order is drawn before this returns. A `state` of the data's own goes
        before the count.
        """
        raise NotImplementedError


class IndexedSource(Source):
    """A map-style loader that reads the indices of an `IndexStream`: nothing is read early."""

    def __init__(self, base: Any, stream: IndexStream, per_step: int) -> None:
        super().__init__(base, per_step, stream.plan)
        self.stream = stream

    def length(self) -> int:
        return len(self.stream)

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        self.stream.start = batches
        iterator = iter(self.base)
        index = self.stream.latest
        assert index is not None
        if draw:
            index.draw()
        return self._items(iterator, index)

    def _items(self, iterator: Iterator[Any], index: IndexIterator) -> Iterator[Item]:
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


class StreamSource(Source):
    """A loader whose end shows only by reading on: it is read one batch ahead."""

    def __init__(self, base: Any, per_step: int) -> None:
        dataset = getattr(base, "dataset", None)
        self.shard = dataset if isinstance(dataset, IterableDatasetShard) else None
        super().__init__(base, per_step, self.shard)
        self.reader = ResumableReader(base)

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        skip = 0 if state is not None else batches
        if self.shard is not None and not getattr(self.base, "num_workers", 0):
            # Samples can be counted where one process reads them all, whatever the ranks were.
            self.shard.skip, skip = skip * self.shard.batch_size, 0
        items = self.reader.batches(state)
        for _ in range(skip // self.per_step):
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


class DealtSource(Source):
    """A loader of any class, which every rank reads whole and keeps its part of."""

    def __init__(
        self, base: Any, steps: StepReader, process_index: int, reads: bool = True
    ) -> None:
        super().__init__(base, steps.per_step, steps)
        self.steps = steps
        self.process_index = process_index
        self.reader = ResumableReader(base) if reads else None

    def length(self) -> int:
        return self.steps.length(len(self.base), self.process_index)

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        assert self.reader is not None
        reading = Reading(self.reader.batches(state))
        skip = 0 if state is not None else batches
        return self._items(self.steps.steps(reading, skip, reading.state_now))

    def _items(self, steps: Iterator[Step]) -> Iterator[Item]:
        for step in steps:
            part = step.parts[self.process_index]
            if part is not NOTHING:
                self.state = step.state
                yield part, step.last[self.process_index], step.real


class DispatchedSource(DealtSource):
    """A loader that rank 0 reads for all. Only there is its state known."""

    def __init__(
        self,
        base: Any,
        stream: IndexStream | None,
        steps: StepReader,
        process_index: int,
        comm: Communicator,
        shard_of_rank: Sequence[int],
        read_ahead: bool = True,
    ) -> None:
        super().__init__(base, steps, process_index, stream is None and comm.rank == SOURCE)
        self.stream = stream
        self.comm = comm
        self.shard_of_rank = shard_of_rank
        self.read_ahead = read_ahead

    @cached_property
    def _group(self) -> Any:
        """A group for messages alone; made once all ranks iterate, and kept."""
        return self.comm.open_group()

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        group, skip = self._group, 0
        reading: Reading | Exception | None = None
        if self.comm.rank == SOURCE:
            try:
                reading, skip = self._open(batches, state)
            except Exception as error:  # the others wait for the first message: tell them there
                reading = error
        shards, ahead = self.shard_of_rank, self.read_ahead
        dispatch = Dispatch(self.steps, reading, skip, self.comm, shards, group, ahead)
        return self._received(dispatch)

    def _received(self, dispatch: Dispatch) -> Iterator[Item]:
        for message in dispatch.messages():
            self.state = message.state
            yield message.part, message.last, message.real

    def _open(self, batches: int, state: Any) -> tuple[Reading, int]:
        """Open the loader; return it, and how many of its batches are passed over.

        Where it reads indices, they begin at the batch that is wanted. What fills up the end of
        the epoch is read all the same, and comes first.
        """
        if self.reader is not None:
            return Reading(self.reader.batches(state)), 0 if state is not None else batches
        stream = self.stream
        assert stream is not None
        stream.start, stream.keep = batches, self.per_step if self.steps.fills else 0
        skip = stream.keep if batches else 0
        try:
            skip = min(skip, len(stream))
        except TypeError:
            pass
        reading = Reading((batch, None, None) for batch in iter(self.base))
        if stream.latest is not None:
            stream.latest.draw()  # before it is watched whether reading draws from the generators
        return reading, skip
