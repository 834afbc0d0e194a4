"""The ways a prepared loader gets its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import length_hint
from typing import Any, Protocol

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.fingerprint import digest_of_order
from accelerate_core.data.order import Wrapper, iterate_from
from accelerate_core.data.resumable import ResumableReader
from accelerate_core.data.shard import ItemShard, IterableDatasetShard
from accelerate_core.data.shared_draws import SharedDraws
from accelerate_core.data.steps import NOTHING, Item, Read, Step, StepReader, steps_of

_END: Any = object()


class IndexStream(Wrapper):
    """Replaces the batch sampler (or sampler) of a loader.

    Args:
        plan: yields this rank's batches; to skip batches, `plan.iterate(start)` is called if it exists.

    Attributes:
        start: where the next iteration begins, in batches of the single-process loader.
        head: how many batches from the start of the epoch are yielded first; padding needs them.
        iterator: the class of iterators.
        draws: the generators of a custom sampler; None if the order is known.
    """

    own_names = ("plan", "state_dict", "load_state_dict")

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.start = 0
        self.head = 0
        self.iterator: type[IndexIterator] = IndexIterator
        self.latest: IndexIterator | None = None
        self.draws: SharedDraws | None = None

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> IndexIterator:
        self.latest = self.iterator(self.plan, self.start, self.head, self.draws)
        return self.latest


class IndexIterator(Iterator[Any]):
    """One iteration over an `IndexStream`.

    It reads one batch of *indices* ahead, so the last batch is known without loading data early.
    Nothing is drawn before the first batch is requested: PyTorch seeds its workers first, and the
    order of draws from the global generator must not change.

    Attributes:
        count: how many batches were returned.
        exhausted: whether no batch is left.
    """

    def __init__(self, plan: Any, start: int, head: int, draws: SharedDraws | None = None) -> None:
        self.plan = plan
        self.draws = draws
        self.start = start
        self.head = head
        self.count = 0
        self.exhausted = False
        self._batches: Iterator[Any] | None = None
        self._next: Any = None
        self._beginning: list[Any] = []
        self._digest: int | None = None

    @property
    def order_digest(self) -> int | None:
        """A digest of the order in which all ranks read; None before it is drawn, or if it isn't kept."""
        if self._digest is None and self._beginning:
            self._digest = digest_of_order(self._beginning)
        return self._digest

    def draw(self) -> None:
        """Draw the order now, and move to the start."""
        if self._batches is None:
            shared = self.draws is not None and self.draws.comm is not None
            batches = self._read_plan() if shared else self._open_plan()
            self._batches = batches if self.draws is None else self.draws.batches(batches)
            self._next = next(self._batches, _END)
            self.exhausted = self._next is _END
            self._beginning = getattr(self.plan, "beginning", [])
            if self.draws is not None:
                self.draws.check(self.order_digest)

    def _open_plan(self) -> Iterator[Any]:
        if hasattr(type(self.plan), "iterate"):
            return iter(self.plan.iterate(self.start))
        return iterate_from(self.plan, self.start, self.head)

    def _read_plan(self) -> Iterator[Any]:
        """Open the plan when the first batch is requested, because `iter` may draw the order."""
        yield from self._open_plan()

    def __next__(self) -> Any:
        if self._batches is None:
            self.draw()
        batch = self._next
        if batch is _END:
            raise StopIteration
        assert self._batches is not None
        self._next = next(self._batches, _END)
        self.exhausted = self._next is _END
        self.count += 1
        return batch


class BatchSource(Protocol):
    """Opens the data of a prepared loader."""

    #: Batches of the single-process loader in one global step.
    per_step: int

    @property
    def filler(self) -> Any:
        """The object that pads the end of the epoch, according to its `even_batches`."""

    def length(self) -> int:
        """Return the number of batches of an epoch; `TypeError` if it is unknown."""

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        """Start an iteration.

        Args:
            batches: where to begin, in batches of the single-process loader.
            draw: whether to draw the order before this returns.
            state: the dataset's own state; it takes precedence over `batches`.
        """


@dataclass(eq=False)
class IndexedSource:
    """A map-style loader that reads the indices of an `IndexStream`, without reading data early.

    Args:
        base: a copy of the user's loader.
        stream: this rank's indices.
        per_step: batches of the single-process loader in one global step.
    """

    base: Any
    stream: IndexStream
    per_step: int

    @property
    def filler(self) -> Any:
        return self.stream.plan

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
            last = index.exhausted and seen == index.count
            yield batch, last, self._real(batch) if last else None, None

    def _real(self, batch: Any) -> int | None:
        plan = self.stream.plan
        real: int | None = getattr(plan, "real", None)
        if real is None or not isinstance(plan, ItemShard):
            return real
        size = batch_size_of(batch)
        return None if size is None else real * size


@dataclass(eq=False)
class ReadSource:
    """A loader whose last batch is only known by reading on, so it is read one global step ahead.

    Args:
        base: a copy of the user's loader.
        per_step: batches of the single-process loader in one global step.
        steps: arranges the batches of `base` in global steps.
        part: the index of this rank's part of a step.
        stream: the indices that `base` reads; None if it reads none.
    """

    base: Any
    per_step: int
    steps: StepReader
    part: int
    stream: IndexStream | None = None

    def __post_init__(self) -> None:
        dataset = getattr(self.base, "dataset", None)
        self.shard = dataset if isinstance(dataset, IterableDatasetShard) else None
        self.filler = self.steps if self.steps.num_processes > 1 else self.shard

    @cached_property
    def reader(self) -> ResumableReader:
        return ResumableReader(self.base)

    def length(self) -> int:
        return steps_of(len(self.base), self.steps, self.part)

    def start(self, batches: int, draw: bool, state: Any = None) -> Iterator[Item]:
        return self._items(self.steps_from(batches, state))

    def steps_from(self, batches: int, state: Any = None) -> Iterator[Step]:
        """Open the loader, and return its global steps. See `BatchSource.start` for the arguments."""
        if self.stream is not None:
            reading, skip = self._open_indices(self.stream, batches)
        elif state is not None and self.reader.can_resume_from(state):
            reading, skip = self.reader.batches(state), 0
        elif self.shard is not None and not getattr(self.base, "num_workers", 0):
            # A single reading process can count samples, whatever the number of ranks was.
            self.shard.skip = batches * self.shard.batch_size
            reading, skip = self.reader.batches(), 0
        else:
            skip = batches * self.steps.per_step // self.per_step
            reading = self.reader.batches()
        return self.steps.steps(reading, skip)

    def _open_indices(self, stream: IndexStream, batches: int) -> tuple[Iterator[Read], int]:
        """Open the loader, and return its batches and how many of them to skip.

        They begin at the requested batch, after the batches from the start of the epoch that padding
        needs.
        """
        stream.start = batches
        stream.head = self.per_step if self.steps.fills else 0
        skip = min(stream.head, length_hint(stream, stream.head)) if batches else 0
        items = zip(iter(self.base), repeat(None), repeat(None))
        if stream.latest is not None:
            stream.latest.draw()  # before anyone observes whether reading draws random numbers
        return items, skip

    def _items(self, steps: Iterator[Step]) -> Iterator[Item]:
        for step in steps:
            part = step.parts[self.part]
            if part is not NOTHING:
                yield part, step.last[self.part], step.real, step.state
