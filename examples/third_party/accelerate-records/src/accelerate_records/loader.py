"""A prepared loader of records. The seed and the epoch determine its order."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_core.plugin import AcceleratorView, ConfigurationError
from accelerate_records.records import Records

__all__ = ["RecordsLoader"]

_VERSION = 1
Batch = dict[str, torch.Tensor]


@dataclass
class _Position:
    """The position in an epoch, shared with loaders that skip batches.

    `seen` counts the samples of all ranks, so it is valid on any number of ranks. `owner` is the
    iteration that advances the position. Without an owner, the next iteration starts here.
    """

    epoch: int = 0
    seen: int = 0
    owner: Any = None

    def start_of(self, epoch: int, seen: int = 0) -> None:
        """Let the next iteration start in this epoch, after `seen` samples."""
        self.epoch = epoch
        self.seen = seen
        self.owner = None


class RecordsLoader:
    """Iterates over the batches of this rank. In a global step, each rank reads other records.

    Args:
        accelerator: the Accelerator that prepares the loader.
        dataset: the records.
        batch_size: samples per rank.
        shuffle: use a new permutation of the records in each epoch.
        drop_last: leave out the last global step if it is not full.
        seed: determines the order, together with the epoch.

    Raises:
        ConfigurationError: the backend does not accept this batch size.
    """

    def __init__(
        self,
        accelerator: AcceleratorView,
        dataset: Records,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.even_batches = True
        self.put_on_device = True
        self._accelerator = accelerator
        self._index, self._count = accelerator.hooks.data_shard()
        fixed = accelerator.hooks.fixed_batch()
        if fixed is not None and batch_size % fixed:
            raise ConfigurationError(
                f"The backend needs batches of a multiple of {fixed} samples, but batch_size is "
                f"{batch_size}. Use {batch_size + -batch_size % fixed}."
            )
        self._always_full = fixed is not None
        self._position = _Position()
        self._latest: Any = None
        self._skip: int | None = None

    @property
    def total_batch_size(self) -> int:
        """Number of samples in a global step."""
        return self.batch_size * self._count

    @property
    def dataset_size(self) -> int:
        """Number of samples in an epoch."""
        return len(self.dataset)

    @property
    def iteration(self) -> int:
        """The epoch of the next iteration."""
        return self._position.epoch

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the most recent batch is the last one of the epoch."""
        return self._latest is not None and bool(self._latest.last)

    @property
    def remainder(self) -> int:
        """Number of real samples in the last global step, or 0 if it is full."""
        return len(self.dataset) % self.total_batch_size

    def __len__(self) -> int:
        begin = 0 if self._skip is None else self._skip * self.total_batch_size
        return sum(1 for _ in self._steps(begin))

    # --- choosing samples -----------------------------------------------------------------------

    @property
    def _fills(self) -> bool:
        several = self._count > 1 or self._always_full
        return self.even_batches and several and not self.drop_last

    def _has_part(self, at: int) -> bool:
        """Whether this rank has a part of the global step that starts at sample `at`."""
        size = len(self.dataset)
        if self.drop_last:
            return at + self.total_batch_size <= size
        return at < size if self._fills else at + self._index * self.batch_size < size

    def _steps(self, begin: int) -> Iterator[int]:
        """Yield the first sample of each global step in which this rank has a part."""
        for at in range(begin, len(self.dataset), self.total_batch_size):
            if self._has_part(at):
                yield at

    def _places(self, at: int) -> torch.Tensor:
        """Return the positions that this rank reads. The end is padded from the start."""
        size = len(self.dataset)
        low = at + self._index * self.batch_size
        places = torch.arange(low, low + self.batch_size)
        if not self._fills:
            return places[places < size]
        return torch.where(places < size, places, (places - size) % size)

    def _order(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(len(self.dataset), generator=generator)

    # --- iterating ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        state = self._accelerator.gradient_state
        batches: Iterator[Batch] = state.serve(self, self._start, self.total_batch_size)
        return batches

    def _start(self, info: Any) -> Iterator[Batch]:
        position = self._position
        if position.owner is not None:  # an earlier iteration was not finished
            position.seen = 0
        if self._skip is not None:
            position.seen = self._skip * self.total_batch_size
        position.owner = info
        return self._batches(info, position.epoch, position.seen)

    def _batches(self, info: Any, epoch: int, begin: int) -> Iterator[Batch]:
        position = self._position
        size = len(self.dataset)
        step = self.total_batch_size
        known: deque[int] = deque()
        # The backend may read ahead, so the start of each batch is queued until it is returned.
        for batch in self._fed(self._read(epoch, begin, known)):
            at = known.popleft()
            info.last = not self._has_part(at + step)
            info.real = size - at if self._fills and at + step > size else None
            self._latest = info
            if position.owner is info:
                position.seen = min(at + step, size)
            yield batch
        if position.owner is info:
            position.start_of(epoch + 1)

    def _read(self, epoch: int, begin: int, known: deque[int]) -> Iterator[Batch]:
        order = self._order(epoch)
        for at in self._steps(begin):
            places = self._places(at)
            known.append(at)
            yield self.dataset.take(places if order is None else order[places])

    def _fed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if not self.put_on_device:
            return batches
        accelerator = self._accelerator
        fed: Iterator[Batch] = accelerator.hooks.feed_device(batches, False)
        return fed

    def skipping(self, num_batches: int) -> RecordsLoader:
        """Return this loader without the first batches of every iteration."""
        clone = copy.copy(self)
        clone._skip = num_batches
        return clone

    # --- positions ------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        if epoch != self._position.epoch:
            self._position.start_of(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It is valid on any number of ranks."""
        return {
            "version": _VERSION,
            "epoch": self._position.epoch,
            "samples_seen": self._position.seen,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_size": len(self.dataset),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position. The next iteration starts there.

        Raises:
            ConfigurationError: the position belongs to another loader.
        """
        own = {"version": _VERSION, "shuffle": self.shuffle, "dataset_size": len(self.dataset)}
        for key, value in own.items():
            if state_dict.get(key) != value:
                raise ConfigurationError(
                    f"The position has {key}={state_dict.get(key)!r}, but this loader has "
                    f"{key}={value!r}."
                )
        self.seed = int(state_dict["seed"])
        epoch, seen = int(state_dict["epoch"]), int(state_dict["samples_seen"])
        self._position.start_of(epoch, seen)
