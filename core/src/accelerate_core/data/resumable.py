"""Read a loader's batches together with the loader's state and the real samples of padded steps.

A worker's copy of the dataset is ahead of what the main process has received, so its state is sent
with each batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.shard import IterableDatasetShard
from accelerate_core.data.steps import Read
from accelerate_core.plugins.discovery import exported


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


#: Where the state of torchdata's loader contains the states of datasets and of their iterators.
_DATA_STATES = ("dataset_state", "dataset_iter_state")


def has_data_state(state: Any) -> bool:
    """Return whether the state of a loader contains a state of its data, or doesn't say.

    Without one, torchdata counts batches, and counts those before a resume twice after it.
    """
    if not isinstance(state, dict):
        return True
    nested = [state]
    data_states = []
    while nested:
        entries = nested.pop()
        data_states += [entries[name] for name in _DATA_STATES if name in entries]
        nested += [value for value in entries.values() if isinstance(value, dict)]
    return not data_states or any(data_state is not None for data_state in data_states)


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


class ResumableReader:
    """Reads a loader, and records its state after every batch.

    The state comes from the loader if it has one, as torchdata's `StatefulDataLoader` does, and
    otherwise from an iterable dataset that has one, in each worker. If an iterable dataset has no
    state of its own, that of the loader isn't used either, and the position is a number of batches.

    Args:
        base: a copy of the user's loader. For an iterable dataset, its collate function is replaced.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._asks_loader = _has_state(base)
        streams = isinstance(base, DataLoader) and isinstance(base.dataset, IterableDataset)
        #: None if only the first state shows it.
        self._counts_batches: bool | None = None if streams and self._asks_loader else False
        self._asks_dataset = streams and not self._asks_loader and _has_state(base.dataset)
        if streams and (self._asks_dataset or isinstance(base.dataset, IterableDatasetShard)):
            in_batches = base.batch_size is None
            tagging = _Tagging(base.dataset, base.collate_fn, in_batches, self._asks_dataset)
            object.__setattr__(base, "collate_fn", tagging)

    def can_resume_from(self, state: Any) -> bool:
        """Return whether a saved state says where to continue."""
        return self._counts_batches is False or has_data_state(state)

    def batches(self, state: Any = None) -> Iterator[Read]:
        """Open the loader, and return an iterator over `(batch, real, state)`.

        `real` is the number of real samples if the global step was padded, else None.

        Args:
            state: where to continue; None for the start.

        Raises:
            MissingPluginError: continuing an iterable dataset needs accelerate-checkpoint.
            ConfigurationError: the state was saved with another number of workers.
        """
        if self._asks_loader and state is not None:
            self.base.load_state_dict(state)
        if not self._asks_dataset:
            return self._read(iter(self.base), None)
        count = max(self.base.num_workers, 1)
        if state is None:
            workers = WorkerStates([0] * count, [None] * count, [None] * count)
            return self._read(iter(self.base), workers)
        items, resumed, passed_over = exported("resume_stream")(self.base, state)
        reading = self._read(items, WorkerStates(**resumed))
        for _ in range(passed_over):
            next(reading, None)
        return reading

    def _read(self, iterator: Iterator[Any], workers: WorkerStates | None) -> Iterator[Read]:
        state = None
        for item in iterator:
            if workers is not None:
                workers.note(item.worker, item.state)
                state = workers.state()
            elif self._asks_loader and not self._counts_batches:
                state = self.base.state_dict()
                if self._counts_batches is None:
                    self._counts_batches = not has_data_state(state)
                    state = None if self._counts_batches else state
            if isinstance(item, TaggedBatch):
                yield item.batch, item.real, state
            else:
                yield item, None, state


@dataclass
class WorkerStates:
    """Tracks how far each worker's dataset has been read.

    Batches come from the workers in turn, and a new iteration begins with the first worker. So the
    saved state is from the start of a round; batches of an unfinished round are read again and
    skipped.
    """

    #: Batches read from each worker, and the states of its dataset after and before its latest batch.
    counts: list[int]
    latest: list[Any]
    before: list[Any]

    def note(self, worker: int, state: Any) -> None:
        """Record the state of a worker's dataset after one of its batches was returned."""
        self.counts[worker] += 1
        self.before[worker] = self.latest[worker]
        self.latest[worker] = state

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {name: list(values) for name, values in vars(self).items()}
