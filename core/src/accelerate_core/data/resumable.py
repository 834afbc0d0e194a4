"""A loader's batches with what is known of each where it was read: the loader's own state, and
how much of a filled up step is real.

What a worker knows travels with its batch, since its copy of the dataset is ahead of what the
main process has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.shard import IterableDatasetShard
from accelerate_core.data.steps import Read
from accelerate_core.errors import ConfigurationError


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute have another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _has_state(obj: Any) -> bool:
    """Say whether an object can tell its state and take it back."""
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(slots=True)
class TaggedBatch:
    """A batch on its way from where it was read."""

    batch: Any
    real: int | None
    worker: int
    state: Any

    def pin_memory(self, device: Any = None) -> TaggedBatch:
        """Pin the batch; called by the loader's pinning thread."""
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        return TaggedBatch(pin(self.batch, device), self.real, self.worker, self.state)


@dataclass
class _Tagging:
    """Collate samples, and tag the batch with what the stream says then.

    It lives where the stream is read, in a worker or not, so the two always agree.
    """

    stream: Any
    collate: Callable[[Any], Any]
    in_batches: bool
    keeps_state: bool

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        real = self.stream.real if isinstance(self.stream, IterableDatasetShard) else None
        if real is not None and self.in_batches:
            size = batch_size_of(batch)
            real = None if size is None else real * size
        if not self.keeps_state:
            return batch if real is None else TaggedBatch(batch, real, 0, None)
        worker = torch.utils.data.get_worker_info()
        state = copy.deepcopy(self.stream.state_dict())
        return TaggedBatch(batch, real, worker.id if worker is not None else 0, state)


@dataclass
class _Restoring:
    """Give each worker's dataset its state before it is iterated, then do what the user asked."""

    states: list[Any]
    init: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        info: Any = torch.utils.data.get_worker_info()
        state = self.states[worker_id]
        if info is not None and state is not None:
            info.dataset.load_state_dict(state)


class ResumableReader:
    """Reads a loader, and notes its state after every batch.

    Args:
        base: a copy of the user's loader; an iterable dataset's collate function is replaced.

    A loader that has a state of its own (torchdata's `StatefulDataLoader`) is asked for it. Else
    an iterable dataset that has one is, in each worker.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._asks_loader = _has_state(base)
        streams = isinstance(base, DataLoader) and isinstance(base.dataset, IterableDataset)
        self._asks_dataset = streams and not self._asks_loader and _has_state(base.dataset)
        if streams and (self._asks_dataset or isinstance(base.dataset, IterableDatasetShard)):
            in_batches = base.batch_size is None
            tagging = _Tagging(base.dataset, base.collate_fn, in_batches, self._asks_dataset)
            object.__setattr__(base, "collate_fn", tagging)

    def batches(self, state: Any = None) -> Iterator[Read]:
        """Iterate over `(batch, real, state)`, from where a state was taken if one is given.

        `real`: samples of the global step if it was filled up, else None. The loader is opened
        before this returns.
        """
        if self._asks_loader and state is not None:
            self.base.load_state_dict(state)
        workers = _WorkerStates(max(self.base.num_workers, 1)) if self._asks_dataset else None
        if workers is None or state is None:
            return self._read(iter(self.base), workers)
        passed_over = workers.restore(state)
        reading = self._read(self._restored(workers.before), workers)
        next(islice(reading, passed_over, passed_over), None)  # moves on by so many
        return reading

    def _restored(self, states: list[Any]) -> Iterator[Any]:
        base = self.base
        if not base.num_workers:
            if states[0] is not None:
                base.dataset.load_state_dict(copy.deepcopy(states[0]))
            return iter(base)
        base.__dict__["_iterator"] = None  # workers that persist would not be initialised anew
        with swapped(base, "worker_init_fn", _Restoring(states, base.worker_init_fn)):
            return iter(base)

    def _read(self, iterator: Iterator[Any], workers: _WorkerStates | None) -> Iterator[Read]:
        state = None
        for item in iterator:
            if workers is not None:
                workers.note(item.worker, item.state)
                state = workers.state()
            elif self._asks_loader:
                state = self.base.state_dict()
            if isinstance(item, TaggedBatch):
                yield item.batch, item.real, state
            else:
                yield item, None, state


class _WorkerStates:
    """How far each worker's dataset has been read.

    Batches come from the workers in turn, and a new iteration begins with the first worker. So
    the state is that at the start of a round, and the batches of the begun round are read again
    and passed over.
    """

    def __init__(self, workers: int) -> None:
        self.counts = [0] * workers
        self.latest: list[Any] = [None] * workers
        self.before: list[Any] = [None] * workers

    def note(self, worker: int, state: Any) -> None:
        """Note that a batch of this worker was handed out, and its dataset's state after it."""
        self.counts[worker] += 1
        self.before[worker] = self.latest[worker]
        self.latest[worker] = state

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        return {name: list(values) for name, values in vars(self).items()}

    def restore(self, state: dict[str, Any]) -> int:
        """Go back to the start of the begun round; return how many batches of it had been seen.

        Raises:
            ConfigurationError: the state is of another number of workers.
        """
        counts = state["counts"]
        if len(counts) != len(self.counts):
            raise ConfigurationError(
                f"The position of an iterable dataset was saved with {len(counts)} reading "
                f"processes and cannot be continued with {len(self.counts)}: every worker has its "
                f"own place in the data. Set num_workers as it was when the position was saved."
            )
        # A worker whose data has ended keeps the count it had: rounds go on without it.
        rounds = max(counts)
        seen = [count == rounds for count in counts]
        if all(seen):  # the round is complete
            seen = [False] * len(counts)
        self.counts = [count - is_seen for count, is_seen in zip(counts, seen, strict=True)]
        # A worker whose batch of the round was seen goes back to where it was before that batch.
        pairs = zip(state["before"], state["latest"], seen, strict=True)
        self.before = [before if is_seen else latest for before, latest, is_seen in pairs]
        self.latest = list(self.before)
        return sum(seen)
