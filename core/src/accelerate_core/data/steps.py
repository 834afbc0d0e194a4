"""Global steps out of a stream of whole batches, of samples or of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any

from accelerate_core.data.batch import batch_size_of, concat_batches, slice_batch
from accelerate_core.data.device_feed import look_ahead
from accelerate_core.errors import ConfigurationError

SliceFn = Callable[..., Any]
#: A raw batch, the number of real samples of its step if known, and the data's state after it.
Read = tuple[Any, int | None, Any]
#: `(batch, last, real, state)`: a rank's batch, whether it's the last, the number of real samples if it
#: was filled up, and the state.
Item = tuple[Any, bool, int | None, Any]
#: The slice of a rank that gets no batch in a step.
NOTHING: Any = object()
_CANNOT_JOIN = (TypeError, ValueError, RuntimeError, KeyError, IndexError)


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise `ConfigurationError` unless a batch can be split equally between the processes."""
    if batch_size is None:
        raise ConfigurationError(
            "split_batches=True needs a batch sampler with a `batch_size`, and this one has none. "
            "Use split_batches=False, or give it the attribute."
        )
    if batch_size % num_processes:
        nearest = max(round(batch_size / num_processes), 1) * num_processes
        raise ConfigurationError(
            f"split_batches=True needs a batch size that is a round multiple of the number of processes: "
            f"{batch_size} is none of {num_processes}. The nearest that is: {nearest}."
        )


def check_rank(num_processes: int, process_index: int) -> None:
    """Raise `ConfigurationError` for a rank outside the world."""
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(
            f"process_index={process_index} is outside of num_processes={num_processes}."
        )


def steps_of(total: int, shard: Any, process_index: int) -> int:
    """Return how many of the global steps made of `total` batches have a part for this rank."""
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
    """Read batches and arrange them in global steps, one step ahead.

    Args:
        num_processes: parts per step.
        split_batches: a step is one batch, cut; else it is `num_processes` batches.
        even_batches: fill up the last step from the start of the epoch.
        drop_last: leave a last step out that is not full.
        slice_fn: the user's `(data, tensor_slice, process_index=, num_processes=) -> part`.
        wanted: the ranks whose parts are needed, all by default.
        batch_size: samples of a full batch, by default those of the first one; 0 if there is no
            such size: what is missing is then replaced by whole batches.
        size_of, cut, join: what is done with batches: their size, a part, several as one.
        evenly: fill a last step up to equal parts only, not to full batches.
        looks_ahead: read a step before the one before it is given. Without it a full step is given as
            soon as it is read, and its `last` and `more` do not say anything.

    An exception while reading ahead is raised when its step is asked for, not before.
    """

    num_processes: int
    split_batches: bool
    even_batches: bool
    drop_last: bool
    slice_fn: SliceFn | None = None
    wanted: Sequence[int] | None = None
    batch_size: int | None = None
    size_of: Callable[[Any], int | None] = batch_size_of
    cut: Callable[[Any, slice, int], Any] = slice_batch
    join: Callable[[Sequence[Any]], Any] = concat_batches
    evenly: bool = False
    looks_ahead: bool = True
    _first: list[Any] = field(default_factory=list, init=False)
    _size: int | None = field(default=None, init=False)

    @property
    def per_step(self) -> int:
        """Batches per step."""
        return 1 if self.split_batches else self.num_processes

    @property
    def fills(self) -> bool:
        """Whether the start of the epoch is needed to fill up its end."""
        return self.even_batches and not self.drop_last

    def steps(self, batches: Iterator[Read], skip: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch, without the first `skip` batches."""
        self._first = []
        self._size = self.batch_size
        if skip:
            passed_over = islice(batches, skip)
            self._read(passed_over)  # which remembers the start of the epoch
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
        """Yield full groups before the next one is read; look ahead from the first short one on."""
        for group in groups:
            size = self.size_of(group[-1][0]) or 0
            if len(group) < self.per_step or size < (self._size or 0):
                yield from look_ahead(chain([group], groups))
                return
            yield group, group, None

    def _read(self, batches: Iterator[Read]) -> list[Read]:
        """Read the batches of a step; note their size, and the start of the epoch for its end."""
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
        return rank * self._width(size) < size

    def _width(self, size: int) -> int:
        """Samples per rank of a step that is one batch of `size` samples."""
        full = size if self.evenly and self.fills else self._size or size
        return max(full, -(-size // self.num_processes) * self.num_processes) // self.num_processes

    def _split(self, batch: Any) -> tuple[list[Any], int | None]:
        size = self.size_of(batch) or 0
        width = self._width(size)
        target = width * self.num_processes
        if size < target and self.fills:
            return self._parts(self._filled([batch], target), width, target), size
        if self.even_batches:
            width = min(width, size // self.num_processes)
        return self._parts(batch, width, size), None

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
        if self.slice_fn is not None and full and len(set(sizes)) == 1 and sizes[0]:
            try:
                return self._parts(self.join(group), sizes[0], sizes[0] * count), None
            except TypeError:
                pass
        return group + [NOTHING] * (count - len(group)), None

    def _fill_dealt(self, group: list[Any], short: bool, real: int | None) -> list[Any]:
        size = self._size
        count = self.num_processes
        if self.evenly and real:
            size = -(-real // count)
        if size and (short or self.evenly or self.slice_fn is not None):
            try:
                return self._parts(self._filled(group, size * count), size, size * count)
            except _CANNOT_JOIN:
                pass  # e.g. padded to different lengths: whole batches have to do
        return group + list(islice(cycle(self._first), count - len(group)))

    def _filled(self, group: list[Any], target: int) -> Any:
        """Join the batches, and as much of the start of the epoch as makes `target` samples."""
        pieces = list(group)
        have = sum(self.size_of(batch) or 0 for batch in group)
        for batch in cycle(self._first):
            if have >= target:
                break
            size = self.size_of(batch) or 0
            if size == 0:
                raise ValueError("An empty batch cannot fill up a step.")
            pieces.append(batch)
            have += size
        return self.cut(self.join(pieces), slice(0, target), have)

    def _parts(self, batch: Any, width: int, total: int) -> list[Any]:
        parts: list[Any] = [NOTHING] * self.num_processes
        wanted = range(self.num_processes) if self.wanted is None else self.wanted
        for rank in wanted:
            part = slice(rank * width, min((rank + 1) * width, total))
            if part.start >= total:
                continue
            if self.slice_fn is None:
                parts[rank] = self.cut(batch, part, total)
            else:
                parts[rank] = self.slice_fn(
                    batch, part, process_index=rank, num_processes=self.num_processes
                )
        return parts
