"""Shards of a dataset: which indices, or which samples of a stream, a rank reads.

In every global step the ranks' batches, joined in rank order, are the next batches of the
single-process loader. With `even_batches`, samples from the start of the epoch complete the last
step, so that every rank gets the same number of full batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from accelerate_core.data.fingerprint import COMPARED
from accelerate_core.data.order import Wrapper, is_plain, parts_of
from accelerate_core.data.steps import NOTHING, StepReader, check_rank, check_split, steps_of


@dataclass(eq=False, repr=False)
class BatchSamplerShard(Wrapper, BatchSampler):
    """The batches of one rank, taken from the batch sampler of the single-process loader.

    Args:
        batch_sampler: yields lists of indices. Without a `batch_size` the lists may have any length;
            short ones stay short, and missing ones are replaced by whole batches.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: every rank gets a part of each batch. Otherwise it gets every
            `num_processes`-th batch.
        even_batches: pad the last global step with samples from the start of the epoch.

    Attributes:
        real: after an iteration, the number of real samples in the last global step if it was
            padded, else None.
        kept_steps: how many global steps of the start of an epoch are kept for comparing orders.
        beginning: the first indices of the epoch over all ranks, or the first batches of a custom
            batch sampler; at most 1,024.

    Raises:
        ConfigurationError: `split_batches` with a batch size that cannot be split equally.
    """

    own_names = ("batch_sampler",)

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    batch_size: Any = field(init=False)
    drop_last: bool = field(init=False)
    real: int | None = field(default=None, init=False)
    kept_steps: int = field(default=0, init=False)
    beginning: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_rank(self.num_processes, self.process_index)
        self.batch_size = getattr(self.batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(self.batch_sampler, "drop_last", False))
        if self.split_batches:
            check_split(self.batch_size, self.num_processes)

    @property
    def total_length(self) -> int:
        """Number of batches of the single-process loader."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        steps = steps_of(len(self.batch_sampler), self, self.process_index)
        return steps - 1 if self._misses_last_part() else steps

    def _misses_last_part(self) -> bool:
        if not self.split_batches or self.even_batches or self.drop_last:
            return False
        try:
            rest = len(self.batch_sampler.sampler) % self.batch_size
        except (AttributeError, TypeError):
            return False
        return bool(0 < rest <= self.process_index * (self.batch_size // self.num_processes))

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[list[int]]:
        """Return this rank's batches of the epoch, starting at batch `start` of the single-process loader."""
        if is_plain(self.batch_sampler):
            return self._parts(start)
        return self._whole_batches(start)

    def _parts(self, start: int) -> Iterator[list[int]]:
        """Slice this rank's part from the sampler's order, without building other ranks' batches."""
        size = self.batch_sampler.batch_size
        width = size // self.num_processes if self.split_batches else size
        return parts_of(self, self.batch_sampler.sampler, width, start * size)

    def _whole_batches(self, start: int) -> Iterator[list[int]]:
        """Arrange the batches of a custom batch sampler in global steps."""
        self.real = None
        rank = self.process_index
        steps = StepReader(
            self.num_processes,
            self.split_batches,
            self.even_batches,
            self.drop_last,
            wanted=[rank],
            batch_size=self.batch_size or 0,
            size_of=len,
            cut=lambda batch, part, _: batch[part],
            join=_joined,
            looks_ahead=False,
        )
        batches = map(list, self.batch_sampler)
        self.beginning = list(islice(batches, min(self.kept_steps * steps.per_step, COMPARED)))
        reading = zip(chain(self.beginning, batches), repeat(None), repeat(None))
        for step in steps.steps(reading, start):
            self.real = step.real
            if step.parts[rank] is not NOTHING:
                yield step.parts[rank]


def _joined(batches: Sequence[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@dataclass(eq=False, repr=False)
class ItemShard(BatchSamplerShard):
    """The items of one rank, for a loader whose dataset returns whole batches.

    `batch_sampler` yields lists of one item. After an iteration, `real` is the number of real
    batches in the last global step if it was padded with the first items of the epoch.
    """

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """Yield this rank's items of the epoch, starting at item `start` of the single-process loader."""
        return (item for [item] in super().iterate(start))


@dataclass(eq=False, repr=False)
class IterableDatasetShard(Wrapper, IterableDataset[Any]):
    """The samples of one rank, taken from a stream that every rank reads.

    Args:
        dataset: the stream; it must yield the same samples on every rank.
        batch_size: samples per batch and rank; with `split_batches`, of all ranks together.
        drop_last: drop an incomplete last global step instead of padding it.
        num_processes: the number of ranks.
        process_index: this rank.
        split_batches: whether `batch_size` counts the samples of all ranks.
        even_batches: whether to pad at all.

    Attributes:
        real: while a padded step is read, the number of its real samples, else None.
        skip: the number of samples, over all ranks, that the next iteration skips.

    If the stream has a state, that state is valid for all ranks: between two batches of a rank,
    whole global steps have been read.

    Raises:
        ConfigurationError: `split_batches` with a batch size that cannot be split equally.
    """

    own_names = ("dataset",)

    dataset: Any
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    real: int | None = field(default=None, init=False)
    skip: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_rank(self.num_processes, self.process_index)
        if self.split_batches:
            check_split(self.batch_size, self.num_processes)

    @property
    def _width(self) -> int:
        """Samples of one rank in one global step."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream if it has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._width * self.num_processes)
        if self.drop_last or not rest:
            return whole * self._width
        if self.even_batches:
            return (whole + 1) * self._width
        own = min(max(rest - self.process_index * self._width, 0), self._width)
        return whole * self._width + own

    def __iter__(self) -> Iterator[Any]:
        skip = self.skip
        self.skip = 0  # applies to one iteration
        for part in parts_of(self, self.dataset, self._width, skip):
            yield from part
