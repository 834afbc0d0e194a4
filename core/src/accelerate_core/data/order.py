"""Read the order of samplers in runs, so that skipping indices is free if the order is known.

PyTorch's samplers yield indices one by one, although they know them in advance as a range or a
permutation. A cursor over that range moves by arithmetic, so the cost of a rank's batch does not
depend on the number of ranks or on how much was skipped. Random numbers are drawn exactly as
PyTorch draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice, tee
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from accelerate_core.data.fingerprint import COMPARED

Run = Any  # a sequence of indices, with a length and slicing


class Wrapper:
    """Wraps an object, and forwards unknown attributes to it.

    `own_names` lists the attribute that holds the object, followed by names that are not forwarded.
    """

    own_names: ClassVar[tuple[str, ...]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.own_names:
            raise AttributeError(name)
        return getattr(getattr(self, self.own_names[0]), name)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on the seed and the epoch.

    Args:
        data_source, replacement, num_samples: as for `torch.utils.data.RandomSampler`.
        generator: the generator to use; it is reseeded at the start of every iteration.
        data_seed: the seed; `torch.initial_seed()` by default. Epoch `e` uses `data_seed + e`.

    Example:
        sampler = SeedableRandomSampler(dataset, data_seed=0)
        sampler.set_epoch(3)  # the order of epoch 3, whatever was read before
        order = list(sampler)
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.initial_seed = torch.initial_seed() if data_seed is None else int(data_seed)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.seed_epoch()
        yield from super().__iter__()

    def seed_epoch(self) -> None:
        """Seed the generator for the current epoch."""
        self.generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch


def order_sampler(loader: Any) -> Any:
    """Return the sampler of single indices of a loader."""
    holder = getattr(loader, "batch_sampler", None)
    if holder is None:
        holder = getattr(loader, "sampler", None)
    return getattr(holder, "sampler", holder)


def draw_as_one(sampler: Any, generator: torch.Generator, drawn_before: bool) -> None:
    """Set a generator so that it draws the order that a single process would draw from torch's state.

    Args:
        drawn_before: whether the loader's iterator draws the seed of its workers first.
    """
    state = torch.get_rng_state()
    if drawn_before:
        torch.empty((), dtype=torch.int64).random_()
    if isinstance(sampler, RandomSampler):
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    else:
        generator.set_state(torch.get_rng_state())
    torch.set_rng_state(state)


def _in_sequence(sampler: Any) -> Iterator[Run]:
    yield range(len(sampler.data_source))


def _shuffled(sampler: Any) -> Iterator[Run]:
    size = len(sampler.data_source)
    wanted = sampler.num_samples
    generator = sampler.generator
    seedable = isinstance(sampler, SeedableRandomSampler)
    if seedable:
        sampler.seed_epoch()
    # A generator that outlives the epoch must make every draw, even unused ones.
    outlives = generator is not None and not seedable
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if sampler.replacement:
        for piece in [32] * (wanted // 32) + [wanted % 32]:
            yield torch.randint(size, (piece,), dtype=torch.int64, generator=generator)
        return
    for _ in range(wanted // size):
        yield torch.randperm(size, generator=generator)
    if wanted % size or outlives:
        yield torch.randperm(size, generator=generator)[: wanted % size]


#: They draw exactly as the samplers of PyTorch: as late, as often and in the same pieces.
_DRAWS: dict[Any, Callable[[Any], Iterator[Run]]] = {
    SequentialSampler.__iter__: _in_sequence,
    RandomSampler.__iter__: _shuffled,
    SeedableRandomSampler.__iter__: _shuffled,
}


class Cursor:
    """A position in the order of a sampler whose runs are known.

    Args:
        order: the indices, in runs.
    """

    def __init__(self, order: Iterator[Run]) -> None:
        self._order = order
        self.run: Run = ()
        #: Converts a slice of the run to a list. It is called for every batch, so both variants are in C.
        self.listed: Callable[[Any], list[Any]] = list
        self.length = 0
        self.at = 0

    def _next_run(self) -> bool:
        run = next(self._order, None)
        if run is None:
            return False
        self.run = run
        self.length = len(run)
        self.at = 0
        self.listed = torch.Tensor.tolist if isinstance(run, torch.Tensor) else list
        return True

    def first(self, count: int) -> list[Any]:
        """Return the first `count` indices; call this before the cursor moves."""
        order, again = tee(self._order)
        self._order = order
        return type(self)(again).take(count)

    def skip(self, count: int) -> int:
        """Skip `count` indices; return how many there were."""
        missing = count
        while True:
            step = min(self.length - self.at, missing)
            self.at += step
            missing -= step
            if not missing or not self._next_run():
                return count - missing

    def take(self, count: int) -> list[Any]:
        """Return the next `count` indices, or fewer at the end."""
        taken: list[Any] = []
        while True:
            stop = min(self.at + count - len(taken), self.length)
            taken += self.listed(self.run[self.at : stop])
            self.at = stop
            if len(taken) == count or not self._next_run():
                return taken

    def part(self, low: int, width: int, step: int) -> tuple[list[Any], int]:
        """Read one step; return its indices [low, low + width) and its length."""
        before = self.skip(low)
        taken = self.take(width)
        return taken, before + len(taken) + self.skip(step - low - width)


class _Stream(Cursor):
    """A position in any iterable: skipping an index means reading it."""

    def skip(self, count: int) -> int:
        passed_over = 0
        for _ in islice(self._order, count):
            passed_over += 1
        return passed_over

    def take(self, count: int) -> list[Any]:
        return list(islice(self._order, count))


def cursor_over(sampler: Any) -> Cursor:
    """Return a cursor at the start of a new iteration over the sampler.

    Nothing is drawn before it moves. For a custom `__iter__`, only the iterator knows the order.
    """
    if isinstance(sampler, (range, list, tuple)):
        return Cursor(iter([sampler]))
    draw = _DRAWS.get(getattr(type(sampler), "__iter__", None))
    return _Stream(iter(sampler)) if draw is None else Cursor(draw(sampler))


def order_is_known(plan: Any) -> bool:
    """Return whether a sampler or batch sampler has the order of one of the samplers above."""
    sampler = plan.sampler if is_plain(plan) else plan
    return getattr(type(sampler), "__iter__", None) in _DRAWS


def is_plain(batch_sampler: Any) -> bool:
    """Return whether a batch sampler just groups the indices of its sampler by `batch_size`."""
    return (
        getattr(type(batch_sampler), "__iter__", None) is BatchSampler.__iter__
        and isinstance(getattr(batch_sampler, "batch_size", None), int)
        and hasattr(batch_sampler, "sampler")
    )


def parts_of(shard: Any, sampler: Any, width: int, start: int) -> Iterator[list[Any]]:
    """Yield one rank's indices of each global step.

    An incomplete last step is dropped, padded from the start of the epoch, or yielded as it is.

    Args:
        shard: has `process_index`, `num_processes`, `drop_last` and `even_batches`. Its `real` is set
            to the number of indices in the last step before padding. If it has `kept_steps`, its
            `beginning` is set to the indices of so many steps at the start of the epoch.
        sampler: the indices of all ranks.
        width: indices per rank and step.
        start: the index at which the first step begins.
    """
    shard.real = None
    step = width * shard.num_processes
    low = width * shard.process_index
    drop_last = shard.drop_last
    fills = shard.even_batches and not drop_last
    cursor = cursor_over(sampler)
    kept_steps = getattr(shard, "kept_steps", 0)
    if kept_steps:
        shard.beginning = cursor.first(min(kept_steps * step, COMPARED))
    first = cursor.first(step) if fills else []
    cursor.skip(start)
    while True:
        at = cursor.at
        if at + step <= cursor.length:  # the same as `part`, without a call for every batch
            cursor.at = at + step
            yield cursor.listed(cursor.run[at + low : at + low + width])
            continue
        own, length = cursor.part(low, width, step)
        if length == step:
            yield own
            continue
        if length and fills:
            begin = max(low - length, 0)
            own += islice(cycle(first), begin, begin + width - len(own))
            shard.real = length
            yield own
        elif own and not drop_last:
            yield own
        return


def iterate_from(plan: Any, start: int, head: int = 0) -> Iterator[Any]:
    """Iterate over a sampler or batch sampler: its first `head` entries, then those from `start`.

    An entry that belongs to both is yielded twice.
    """
    return _entries(plan, start, head) if start else iter(plan)


def _entries(plan: Any, start: int, head: int) -> Iterator[Any]:
    if is_plain(plan):
        for batch in _groups_from(plan.sampler, plan.batch_size, start, head):
            if len(batch) == plan.batch_size or not plan.drop_last:
                yield batch
    else:
        for [entry] in _groups_from(plan, 1, start, head):
            yield entry


def _groups_from(sampler: Any, size: int, start: int, head: int) -> Iterator[list[Any]]:
    """Yield the first `head` groups of `size` indices, then the groups from `start` on."""
    cursor = cursor_over(sampler)
    first = cursor.take(head * size)
    cursor.skip(max(start - head, 0) * size)
    for part in (first, first[start * size :]):
        for begin in range(0, len(part), size):
            yield part[begin : begin + size]
    group = cursor.take(size)
    while group:
        yield group
        group = cursor.take(size)
