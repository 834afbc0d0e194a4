"""Arrange a stream of batches, of samples or of indices, in global steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any

from accelerate_core.data.batch import batch_size_of, concat_batches, slice_batch
from accelerate_core.data.device_feed import look_ahead
from accelerate_core.errors import ConfigurationError

#: A raw batch, the number of real samples of its step if known, and the data's state after it.
Read = tuple[Any, int | None, Any]
#: `(batch, last, real, state)`: a rank's batch, whether it's the last, the number of real samples if it
#: was padded, and the state.
Item = tuple[Any, bool, int | None, Any]
#: The slice of a rank that gets no batch in a step.
NOTHING: Any = object()
_CANNOT_JOIN = (TypeError, ValueError, RuntimeError, KeyError, IndexError)


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise a `ConfigurationError` unless the processes can split a batch equally."""
    if batch_size is None:
        raise ConfigurationError(
            "split_batches=True needs a batch sampler with a `batch_size` attribute, which this one "
            "lacks. Use split_batches=False, or add the attribute."
        )
    if batch_size % num_processes:
        nearest = max(round(batch_size / num_processes), 1) * num_processes
        raise ConfigurationError(
            f"split_batches=True divides each batch among the processes, and batch_size={batch_size} is "
            f"not divisible by num_processes={num_processes}. The nearest batch size that is: {nearest}."
        )


def check_rank(num_processes: int, process_index: int) -> None:
    """Raise a `ConfigurationError` for a rank outside the world."""
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(
            f"process_index={process_index} must be at least 0 and less than num_processes={num_processes}."
        )


def steps_of(total: int, shard: Any, process_index: int) -> int:
    """Return in how many of the global steps of `total` batches this rank has a part."""
    if shard.split_batches:
        return total
    whole, rest = divmod(total, int(shard.num_processes))
    if not rest or shard.drop_last:
        return whole
    return whole + (1 if shard.even_batches else int(process_index < rest))


@dataclass(slots=True)
class Step:
    """One global step of a loader: a slice for each rank, and whether more steps follow.

    Attributes:
        parts: the batch of each rank; `NOTHING` for a rank without one.
        last: for each rank, whether this is its last batch.
        more: whether any rank gets another batch.
        real: the number of real samples if the step was padded, else None.
        state: the state of the loader after this step; None if it has no state.
    """

    parts: list[Any]
    last: list[bool]
    more: bool
    real: int | None
    state: Any = None


@dataclass(eq=False)
class StepReader:
    """Reads batches one step ahead, and arranges them in global steps.

    Args:
        num_processes: parts per step.
        split_batches: a step is one batch, split among the ranks. Otherwise it is `num_processes` batches.
        even_batches: pad the last step with samples from the start of the epoch.
        drop_last: drop an incomplete last step.
        wanted: the ranks whose parts are needed; by default all.
        batch_size: samples in a full batch; by default the size of the first one. 0 means that
            batches have no fixed size; missing ones are then replaced by whole batches.
        size_of: returns the size of a batch.
        cut: returns a slice of a batch.
        join: joins several batches.
        looks_ahead: whether to read one step ahead. Otherwise a full step is yielded as soon as it
            is read, and its `last` and `more` have no meaning.

    An exception while reading ahead is raised when its step is requested.
    """

    num_processes: int
    split_batches: bool
    even_batches: bool
    drop_last: bool
    wanted: Sequence[int] | None = None
    batch_size: int | None = None
    size_of: Callable[[Any], int | None] = batch_size_of
    cut: Callable[[Any, slice, int], Any] = slice_batch
    join: Callable[[Sequence[Any]], Any] = concat_batches
    looks_ahead: bool = True
    _first: list[Any] = field(default_factory=list, init=False)
    _size: int | None = field(default=None, init=False)

    @property
    def per_step(self) -> int:
        """Batches per step."""
        return 1 if self.split_batches else self.num_processes

    @property
    def fills(self) -> bool:
        """Whether the start of the epoch is needed to pad its end."""
        return self.even_batches and not self.drop_last

    def steps(self, batches: Iterator[Read], skip: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, skipping the first `skip` batches."""
        self._first = []
        self._size = self.batch_size
        if skip:
            passed_over = islice(batches, skip)
            self._read(passed_over)  # remembers the start of the epoch
            for _ in passed_over:
                pass
        groups = self._groups(batches)
        pairs = look_ahead(groups) if self.looks_ahead else self._as_they_come(groups)
        for group, following, failure in pairs:
            more = failure is not None or following is not None
            last = [
                not more or (following is not None and not self._has_part(following, rank))
                for rank in range(self.num_processes)
            ]
            _, told, state = group[-1]
            batches_of_step = [batch for batch, _, _ in group]
            if self.split_batches:
                parts, real = self._split(batches_of_step[0])
            else:
                parts, real = self._dealt(batches_of_step, not more)
            yield Step(parts, last, more, told if real is None else real, state)

    def _groups(self, batches: Iterator[Read]) -> Iterator[list[Read]]:
        """Yield the batches of each step."""
        group = self._read(batches)
        while group:
            yield group
            group = self._read(batches)

    def _as_they_come(self, groups: Iterator[list[Read]]) -> Iterator[Any]:
        """Yield full groups before reading the next one; look ahead from the first short group on."""
        for group in groups:
            size = self.size_of(group[-1][0]) or 0
            if len(group) < self.per_step or size < (self._size or 0):
                yield from look_ahead(chain([group], groups))
                return
            yield group, group, None

    def _read(self, batches: Iterator[Read]) -> list[Read]:
        """Read the batches of a step; remember their size, and the start of the epoch for padding."""
        group = list(islice(batches, self.per_step))
        if group and self._size is None:
            self._size = self.size_of(group[0][0])
            if self.split_batches:
                check_split(self._size, self.num_processes)
        if not self._first and self.fills:
            self._first = [batch for batch, _, _ in group]
        return [] if self.drop_last and len(group) < self.per_step else group

    def _has_part(self, group: list[Read], rank: int) -> bool:
        if self.even_batches or not self.split_batches:
            return self.even_batches or rank < len(group)
        size = self.size_of(group[0][0]) or 0
        return rank * self.width(size) < size

    def width(self, size: int) -> int:
        """Samples per rank of a step that is one batch of `size` samples."""
        full = self._size or size
        return max(full, -(-size // self.num_processes) * self.num_processes) // self.num_processes

    def _split(self, batch: Any) -> tuple[list[Any], int | None]:
        size = self.size_of(batch) or 0
        width = self.width(size)
        target = width * self.num_processes
        if size < target and self.fills:
            return self.cut_parts(self._filled([batch], target), width, target), size
        if self.even_batches:
            width = min(width, size // self.num_processes)
        return self.cut_parts(batch, width, size), None

    def _dealt(self, group: list[Any], is_last: bool) -> tuple[list[Any], int | None]:
        count = self.num_processes
        sizes = [self.size_of(batch) for batch in group]
        known = [size for size in sizes if size is not None]
        all_known = len(known) == len(sizes)
        short = is_last and all_known and known[-1] < (self._size or 0)
        full = len(group) == count and not short
        if not full and self.fills:
            real = sum(known) if all_known else None
            return self._fill_dealt(group, short, real), real
        if full:
            return self.deal_full(group, sizes), None
        return group + [NOTHING] * (count - len(group)), None

    def deal_full(self, group: list[Any], sizes: list[int | None]) -> list[Any]:
        """Return the parts of a full step. `sizes` are the sizes of its batches."""
        return group

    def _fill_dealt(self, group: list[Any], short: bool, real: int | None) -> list[Any]:
        count = self.num_processes
        size = self.padded_size(short, real)
        if size:
            try:
                return self.cut_parts(self._filled(group, size * count), size, size * count)
            except _CANNOT_JOIN:
                pass  # batches of different shapes cannot be joined, so whole batches are repeated
        return group + list(islice(cycle(self._first), count - len(group)))

    def padded_size(self, short: bool, real: int | None) -> int | None:
        """Return the samples per rank of a step that is joined and padded; None to repeat whole batches."""
        return self._size if short else None

    def _filled(self, group: list[Any], target: int) -> Any:
        """Join the batches, and pad them to `target` samples from the start of the epoch."""
        pieces = list(group)
        have = sum(self.size_of(batch) or 0 for batch in group)
        for batch in cycle(self._first):
            if have >= target:
                break
            size = self.size_of(batch) or 0
            if size == 0:
                raise ValueError("An empty batch cannot pad a step.")
            pieces.append(batch)
            have += size
        return self.cut(self.join(pieces), slice(0, target), have)

    def cut_parts(self, batch: Any, width: int, total: int) -> list[Any]:
        parts: list[Any] = [NOTHING] * self.num_processes
        wanted = range(self.num_processes) if self.wanted is None else self.wanted
        for rank in wanted:
            part = slice(rank * width, min((rank + 1) * width, total))
            if part.start >= total:
                continue
            parts[rank] = self.cut_part(batch, part, total, rank)
        return parts

    def cut_part(self, batch: Any, part: slice, total: int, rank: int) -> Any:
        """Return the samples `part` of a batch of `total` samples."""
        return self.cut(batch, part, total)
