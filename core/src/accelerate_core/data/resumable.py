"""Read a loader's batches together with the loader's state and the real samples of padded steps.

A worker's copy of the dataset is ahead of what the main process has received, so its state is sent
with each batch.
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
    """Replace the value of an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _has_state(obj: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(slots=True)
class TaggedBatch:
    """A batch with its number of real samples, and the worker and dataset state it comes from."""

    batch: Any
    real: int | None
    worker: int
    state: Any

    def pin_memory(self, device: Any = None) -> TaggedBatch:
        """Pin the batch. The pinning thread of the loader calls this."""
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        return TaggedBatch(pin(self.batch, device), self.real, self.worker, self.state)


@dataclass
class _Tagging:
    """Collates samples, and tags the batch with the state of the stream.

    It runs in the process that reads the stream, so batch and state always match.
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
    """Calls the user's `worker_init_fn`, then restores the state of the worker's dataset."""

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
    """Reads a loader, and records its state after every batch.

    The state comes from the loader if it has one, as torchdata's `StatefulDataLoader` does, and
    otherwise from an iterable dataset that has one, in each worker.

    Args:
        base: a copy of the user's loader. For an iterable dataset, its collate function is replaced.
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
        """Open the loader, and return an iterator over `(batch, real, state)`.

        `real` is the number of real samples if the global step was padded, else None.

        Args:
            state: where to continue; None for the start.
        """
        if self._asks_loader and state is not None:
            self.base.load_state_dict(state)
        workers = _WorkerStates(max(self.base.num_workers, 1)) if self._asks_dataset else None
        if workers is None or state is None:
            return self._read(iter(self.base), workers)
        passed_over = workers.restore(state)
        reading = self._read(self._restored(workers.before), workers)
        next(islice(reading, passed_over, passed_over), None)  # skips them
        return reading

    def _restored(self, states: list[Any]) -> Iterator[Any]:
        base = self.base
        if not base.num_workers:
            if states[0] is not None:
                base.dataset.load_state_dict(copy.deepcopy(states[0]))
            return iter(base)
        base.__dict__["_iterator"] = None  # persistent workers would not run worker_init_fn again
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
    """Tracks how far each worker's dataset has been read.

    Batches come from the workers in turn, and a new iteration begins with the first worker. So the
    saved state is from the start of a round; batches of an unfinished round are read again and
    skipped.
    """

    def __init__(self, workers: int) -> None:
        self.counts = [0] * workers
        self.latest: list[Any] = [None] * workers
        self.before: list[Any] = [None] * workers

    def note(self, worker: int, state: Any) -> None:
        """Record the state of a worker's dataset after one of its batches was returned."""
        self.counts[worker] += 1
        self.before[worker] = self.latest[worker]
        self.latest[worker] = state

    def state(self) -> dict[str, Any]:
        """Return the argument of `restore`."""
        return {name: list(values) for name, values in vars(self).items()}

    def restore(self, state: dict[str, Any]) -> int:
        """Return to the start of the unfinished round; return how many of its batches were read.

        Raises:
            ConfigurationError: the state was saved with another number of workers.
        """
        counts = state["counts"]
        if len(counts) != len(self.counts):
            raise ConfigurationError(
                f"The position of an iterable dataset was saved with {len(counts)} reading "
                f"processes and cannot be loaded with {len(self.counts)}, because every worker has its "
                f"own position in the data. Set num_workers to its value when the position was saved."
            )
        # A worker without data keeps its count; the rounds continue without it.
        rounds = max(counts)
        seen = [count == rounds for count in counts]
        if all(seen):  # the round is complete
            seen = [False] * len(counts)
        self.counts = [count - is_seen for count, is_seen in zip(counts, seen, strict=True)]
        # A worker whose batch of this round was read returns to its state before that batch.
        pairs = zip(state["before"], state["latest"], seen, strict=True)
        self.before = [before if is_seen else latest for before, latest, is_seen in pairs]
        self.latest = list(self.before)
        return sum(seen)
