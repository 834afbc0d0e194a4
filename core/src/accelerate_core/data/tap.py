"""A loader's batches with what is known of each where it was read: the loader's own state, and
how much of a filled up step is real.

What a worker knows travels with its batch, since its copy of the dataset is ahead of what the
main process has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_core.data.batch import batch_size_of
from accelerate_core.data.shard import IterableDatasetShard
from accelerate_core.errors import ConfigurationError

__all__ = ["Tagged", "Tap", "has_state"]


def has_state(obj: Any) -> bool:
    """Say whether an object can tell its state and take it back."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


class Tagged:
    """A batch on its way from where it was read."""

    __slots__ = ("batch", "real", "state", "worker")

    def __init__(self, batch: Any, real: int | None, worker: int, state: Any) -> None:
        self.batch = batch
        self.real = real
        self.worker = worker
        self.state = state

    def pin_memory(self, device: Any = None) -> Tagged:
        """Pin the batch; called by the loader's pinning thread."""
        pin: Any = torch.utils.data._utils.pin_memory.pin_memory
        return Tagged(pin(self.batch, device), self.real, self.worker, self.state)


class _Tagging:
    """Collate samples, and tag the batch with what the stream says then.

    It lives where the stream is read, in a worker or not, so the two always agree.
    """

    def __init__(self, stream: Any, collate: Callable[[Any], Any], keeps_state: bool) -> None:
        self.stream = stream
        self.collate = collate
        self.keeps_state = keeps_state

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        shard = self.stream if isinstance(self.stream, IterableDatasetShard) else None
        real = shard.real if shard is not None else None
        if not self.keeps_state:
            return batch if real is None else Tagged(batch, real, 0, None)
        worker = torch.utils.data.get_worker_info()
        state = copy.deepcopy(self.stream.state_dict())
        return Tagged(batch, real, worker.id if worker is not None else 0, state)


class _Restoring:
    """Give each worker's dataset its state before it is iterated, then do what the user asked."""

    def __init__(self, states: list[Any], init: Callable[[int], Any] | None) -> None:
        self.states = states
        self.init = init

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        info: Any = torch.utils.data.get_worker_info()
        state = self.states[worker_id]
        if info is not None and state is not None:
            info.dataset.load_state_dict(state)


class Tap:
    """Reads a loader, and notes its state after every batch.

    Args:
        base: a copy of the user's loader; an iterable dataset's collate function is replaced.

    A loader that has a state of its own (torchdata's `StatefulDataLoader`) is asked for it. Else
    an iterable dataset that has one is, in each worker. `keeps_state` says whether either holds.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._asks_loader = has_state(base)
        streams = isinstance(base, DataLoader) and isinstance(base.dataset, IterableDataset)
        self._asks_dataset = streams and not self._asks_loader and has_state(base.dataset)
        self._in_batches = streams and base.batch_size is None
        if streams and (self._asks_dataset or isinstance(base.dataset, IterableDatasetShard)):
            tagging = _Tagging(base.dataset, base.collate_fn, self._asks_dataset)
            object.__setattr__(base, "collate_fn", tagging)

    @property
    def keeps_state(self) -> bool:
        """Whether the state after a batch is known."""
        return self._asks_loader or self._asks_dataset

    def batches(self, state: Any = None) -> Iterator[tuple[Any, int | None, Any]]:
        """Iterate over `(batch, real, state)`, from where a state was taken if one is given.

        `real`: samples of the global step if it was filled up, else None. The loader is opened
        before this returns.
        """
        if self._asks_loader:
            if state is not None:
                self.base.load_state_dict(state)
            return self._asked(iter(self.base))
        if not self._asks_dataset:
            return ((*self._opened(batch), None) for batch in iter(self.base))
        progress = _Progress(max(self.base.num_workers, 1))
        if state is None:
            return self._tagged(iter(self.base), progress)
        passed_over = progress.restore(state)
        iterator = self._restored(progress.before)
        for tagged in islice(iterator, passed_over):
            progress.note(tagged.worker, tagged.state)
        return self._tagged(iterator, progress)

    def _restored(self, states: list[Any]) -> Iterator[Any]:
        base = self.base
        if not base.num_workers:
            if states[0] is not None:
                base.dataset.load_state_dict(copy.deepcopy(states[0]))
            return iter(base)
        init = base.worker_init_fn
        base.__dict__["_iterator"] = None  # workers that persist would not be initialised anew
        object.__setattr__(base, "worker_init_fn", _Restoring(states, init))
        try:
            return iter(base)
        finally:
            object.__setattr__(base, "worker_init_fn", init)

    def _asked(self, iterator: Iterator[Any]) -> Iterator[tuple[Any, int | None, Any]]:
        for batch in iterator:
            state = self.base.state_dict()
            yield (*self._opened(batch), state)

    def _tagged(
        self, iterator: Iterator[Any], progress: _Progress
    ) -> Iterator[tuple[Any, int | None, Any]]:
        for tagged in iterator:
            progress.note(tagged.worker, tagged.state)
            yield (*self._opened(tagged), progress.state())

    def _opened(self, batch: Any) -> tuple[Any, int | None]:
        if not isinstance(batch, Tagged):
            return batch, None
        if batch.real is None:
            return batch.batch, None
        size = batch_size_of(batch.batch) if self._in_batches else 1
        return batch.batch, None if size is None else batch.real * size


class _Progress:
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
        return {
            "counts": list(self.counts),
            "latest": list(self.latest),
            "before": list(self.before),
        }

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
        ahead = [count == rounds for count in counts]
        if all(ahead) or len(counts) == 1:
            self.counts, self.before = list(counts), list(state["latest"])
            self.latest = list(state["latest"])
            return 0
        start = [
            before if is_ahead else latest
            for before, latest, is_ahead in zip(
                state["before"], state["latest"], ahead, strict=True
            )
        ]
        self.counts = [count - is_ahead for count, is_ahead in zip(counts, ahead, strict=True)]
        self.before, self.latest = list(start), list(start)
        return sum(ahead)
