"""Prepared loaders: the user's loader, restricted to this rank's part, with a known last batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.contract.members import BatchView, GradientStateView
from accelerate_core.data.batch import batch_size_of, concat_batches, needs_move, slice_batch
from accelerate_core.data.device_feed import feed
from accelerate_core.data.order import SeedableRandomSampler, draw_as_one, order_sampler
from accelerate_core.data.position import OrderState, Position
from accelerate_core.data.resumable import swapped
from accelerate_core.data.rng import find_generator, synchronize_rng_states
from accelerate_core.data.sources import BatchSource, IndexedSource
from accelerate_core.data.steps import Item, check_rank
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError, warn
from accelerate_core.pickling import unwrapped
from accelerate_core.training.gradient_state import BatchInfo, GradientState

_RESTORED = "load_state moved this loader to batch {} of its epoch (counted over all ranks)."
_TWICE = " No backward followed. If your script skips batches itself, set restore_positions=False."


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader is split across the ranks, and the device of its batches.

    Args:
        config: how data is split across the ranks.
        num_processes, process_index: the number of ranks with different data, and the index of this rank.
        device, put_on_device: the device of batches, and whether they are moved to it.
        rng_types: generators whose state rank 0 shares at the start of every iteration: "torch",
            "generator" (of the sampler or dataset) or a device type. None means `["generator"]`.
        slice_fn_for_dispatch: `(data, tensor_slice, process_index=, num_processes=)` -> part.
        comm: the communicator of the ranks, or None if they don't communicate.
        order_comm: the communicator of all ranks that must read in the same order, if several ranks read
            the same part and `comm` only has ranks with different parts; default: `comm`.
        gradient_state: receives the start and end of iterations, and every batch.
        feed: iterator of batches -> iterator of batches on the device, for `put_on_device`.
        feed_always: whether to call `feed` even if batches are already on the device.
        fixed_batch: fill a short batch up to the loader's batch size and a multiple of this number.
        sets_epoch: whether to call `set_epoch` of samplers and datasets at the start of every iteration.

    Raises:
        ConfigurationError: `process_index` is not the index of a rank.
    """

    config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    num_processes: int = 1
    process_index: int = 0
    device: torch.device | None = None
    put_on_device: bool = False
    rng_types: Sequence[Any] | None = None
    slice_fn_for_dispatch: Callable[..., Any] | None = None
    comm: Communicator | None = None
    order_comm: Communicator | None = None
    gradient_state: GradientStateView | None = None
    feed: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    feed_always: bool = False
    fixed_batch: int | None = None
    sets_epoch: bool = False

    def __post_init__(self) -> None:
        check_rank(self.num_processes, self.process_index)


class BaseAttribute:
    """An attribute that a prepared loader reads from and writes to its `base`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, loader: Any, owner: type) -> Any:
        return self if loader is None else getattr(loader.base, self.name)

    def __set__(self, loader: Any, value: Any) -> None:
        setattr(loader.base, self.name, value)


def _of_base() -> Any:
    return BaseAttribute()


class CoreLoader(DataLoader[Any]):
    """The loader that `prepare` returns.

    It has the attributes of a `DataLoader`. `batch_sampler`, `sampler` and `collate_fn` belong to the
    user's loader, not to this rank's part. Other attributes of a custom loader class are available
    through `base`.

    Args:
        base: a copy of the user's loader that reads this rank's part (all of it, for dispatching). It
            is not rebuilt, so it keeps its class, workers, collate function and attributes.
        source: reads batches from `base`.
        view: the user's loader as seen from outside, with the order that all ranks follow.
        users: the user's loader itself; pickling or copying this loader pickles or copies that one.
        options: how data is split across the ranks, and the device of batches.
        batch_size: the batch size of the user's loader, or None if it has none.
    """

    dataset = _of_base()
    batch_size = _of_base()
    drop_last = _of_base()
    generator = _of_base()
    num_workers = _of_base()
    worker_init_fn = _of_base()
    multiprocessing_context = _of_base()
    persistent_workers = _of_base()
    prefetch_factor = _of_base()
    pin_memory = _of_base()
    pin_memory_device = _of_base()
    timeout = _of_base()
    in_order = _of_base()

    def __init__(
        self,
        base: Any,
        source: BatchSource,
        view: Any,
        users: Any,
        options: LoaderOptions,
        batch_size: int | None,
    ) -> None:
        # DataLoader.__init__ is not called, because `base` is already checked and built.
        self.base = base
        self.options = options
        self.batch_sampler = getattr(view, "batch_sampler", None)
        self.sampler: Any = getattr(view, "sampler", None)
        self.collate_fn: Any = getattr(view, "collate_fn", None)
        self.split_batches = options.config.split_batches
        self.gradient_state = options.gradient_state
        self.synchronized_generator: torch.Generator | None = find_generator(view)
        self._source = source
        self._view = view
        self._users = users
        self._batch_size = batch_size
        self._skip: int | None = None
        self._moved = False
        self._position = Position()
        self._runs: list[BatchView] = []
        #: The iteration that yielded the last batch.
        self._latest: BatchView = BatchInfo()

    def __reduce__(self) -> Any:
        # State of this run is not pickled; a pickle or a copy contains the user's own loader.
        return unwrapped, (self._users,)

    def __repr__(self) -> str:
        part = f"rank {self.options.process_index} of {self.options.num_processes}"
        return f"{type(self).__name__}({part}, base={self.base!r})"

    def __len__(self) -> int:
        return max(int(self._source.length()) - (self._skip or 0), 0)

    # -- what a loop may read ----------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """The device of the batches; None if unknown."""
        return self.options.device

    @property
    def put_on_device(self) -> bool:
        """Whether batches are moved to `device`."""
        return self.options.put_on_device

    @put_on_device.setter
    def put_on_device(self, value: bool) -> None:
        self.options = replace(self.options, put_on_device=value)

    @property
    def rng_types(self) -> Sequence[Any] | None:
        """Random generators that are synchronised at the start of each iteration."""
        return self.options.rng_types

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch yielded last is the last one of the epoch."""
        return bool([self._latest, *self._runs][-1].last)

    @property
    def remainder(self) -> int:
        """Real samples in an incomplete last global batch; 0 if it is complete, -1 if unknown."""
        if self._latest.real is not None:
            return self._latest.real
        if getattr(self.batch_sampler, "drop_last", getattr(self.base, "drop_last", False)):
            return -1
        size, step = self.dataset_size, self.total_batch_size
        return -1 if size is None or not step else size % step

    @property
    def total_batch_size(self) -> int | None:
        """Samples per global step over all ranks; None if the loader has no batch size."""
        size = self._batch_size
        return size if size is None or self.split_batches else size * self.options.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset; `TypeError` if it has no length."""
        dataset = getattr(self._view, "dataset", None)
        length = getattr(dataset, "total_length", None)
        return int(length) if length is not None else len(dataset)  # type: ignore[arg-type]

    @property
    def dataset_size(self) -> int | None:
        """Number of samples in the dataset; None if it has no length."""
        try:
            return self.total_dataset_length
        except (TypeError, AttributeError):
            return None

    @property
    def even_batches(self) -> bool:
        """Whether the last global step is padded."""
        return bool(getattr(self._source.filler, "even_batches", True))

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        filler = self._source.filler
        if filler is not None and hasattr(filler, "even_batches"):
            filler.even_batches = value

    @property
    def order_digest(self) -> int | None:
        """A digest of the order in which this rank believes that all ranks read the current epoch.

        It is equal on ranks that read in one order, and covers about 1,024 indices at the start of the
        epoch. None if there is no such order: on one process, for streams and dispatched data, if the
        loader was sharded before, and before the first batch.
        """
        iterator = self._source.stream.latest if isinstance(self._source, IndexedSource) else None
        return None if iterator is None else iterator.order_digest

    # -- epochs and positions ----------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The epoch of the next iteration."""
        return int(self._position.epoch)

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._position.epoch = value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of samplers and datasets that shuffle by epoch."""
        position = self._position
        if position.owner is None and position.epoch != epoch:
            position.start_of(epoch)
        position.epoch = epoch
        position.epoch_was_set = True
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        holder = self.batch_sampler
        owners = [holder, self.sampler, getattr(self.base, "dataset", None)]
        while holder is not None:  # a batch sampler may be around another one
            owners.append(getattr(holder, "sampler", None))
            holder = getattr(holder, "batch_sampler", None)
        for owner in {id(owner): owner for owner in owners}.values():
            tell = getattr(owner, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def _seedable(self) -> SeedableRandomSampler | None:
        sampler = order_sampler(self)
        return sampler if isinstance(sampler, SeedableRandomSampler) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position; batches read so far are not repeated after loading it.

        The public keys are `epoch`, `batches_seen` (per rank) and `samples_seen` (over all ranks);
        the others restore the order. The position is valid for any number of ranks.
        """
        state: dict[str, Any] = self._position.state_dict(
            self._batch_size, self._source.per_step, self._workers_live_on()
        )
        state["dataset_size"] = self.dataset_size
        generator = self.synchronized_generator
        if generator is not None and "torch_rng" not in state:
            state["generator"] = generator.get_state()
        sampler = self._seedable()
        if sampler is not None:
            state["seed"] = sampler.initial_seed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, from the next iteration on.

        Raises:
            ConfigurationError: the state is not from a prepared loader, or its number of samples is
                not divisible by the batch size.
        """
        position, size = self._position, self._batch_size
        # A running iteration that is at this position continues.
        running = any(run is position.owner for run in self._runs)
        if not (running and position.is_at(state_dict, size)):
            position.load_state_dict(state_dict, size)
        drew = "generator" in state_dict
        # On several ranks, the sampler has its own generator.
        if drew and self.synchronized_generator is None:
            order_sampler(self).generator = self.synchronized_generator = torch.Generator()
        generator = self.synchronized_generator
        if generator is not None and drew and "torch_rng" not in state_dict:
            generator.set_state(state_dict["generator"])  # saved between epochs
        sampler = self._seedable()
        if sampler is not None and "seed" in state_dict:
            sampler.initial_seed = state_dict["seed"]
        if position.epoch_was_set:
            self._tell_epoch(position.epoch)

    def skipping(self, num_batches: int) -> CoreLoader:
        """Return this loader without the first `num_batches` batches of every iteration."""
        at, seen = self._position, self._position.batches
        begun = at.owner is not None or at.ended
        if not begun and seen not in (0, num_batches * self._source.per_step):
            warn(
                f"{_RESTORED.format(seen)} skip_first_batches({num_batches}) counts from its start."
            )
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)  # the position is shared
        clone._skip = num_batches
        clone._runs = []
        clone._latest = BatchInfo()
        return clone

    def read_on(self, source: IndexedSource, options: LoaderOptions) -> None:
        """Read another part of the data; a running iteration does so from its next batch on."""
        self._source = source
        self.base = source.base
        self.options = options
        self._moved = True

    # -- iterating ---------------------------------------------------------------------------

    def __iter__(self) -> Any:
        whole, fixed = self.total_batch_size, self.options.fixed_batch
        if whole is not None and fixed is not None:
            whole += -whole % fixed
        state = self.gradient_state or GradientState(num_steps=1)  # not part of an Accelerator
        return state.serve(self, self._batches, whole)

    def _start(self, owner: object) -> Iterator[Item]:
        """Open the source where this iteration begins, and record the position."""
        options = self.options
        position = self._position
        self._moved = False
        if options.order_comm is not None:
            generator = self.synchronized_generator
            synchronize_rng_states(options.rng_types, generator, options.order_comm)
        sampler = self._seedable()
        if sampler is not None:
            sampler.set_epoch(position.epoch)
        if options.sets_epoch:
            self._tell_epoch(position.epoch)
        if position.owner is not None:  # an earlier iteration was not finished
            position.start_of(position.epoch)
            position.kept_workers = False
        elif position.ended and self._skip == 0:
            # That epoch has ended, and no batch of the next one is skipped.
            position.start_of(position.epoch + 1)
        if self._skip is not None:
            position.batches = self._skip * self._source.per_step
            position.loader_state = None
        generator = self.synchronized_generator
        kept_workers = position.kept_workers
        draw = position.order is not None and position.loader_state is None
        source = self._source
        draws = source.stream.draws if isinstance(source, IndexedSource) else None
        order = position.order or OrderState.capture(generator, draws)
        position.owner = owner
        position.ended = False
        position.order = order
        position.kept_workers = kept_workers or self._workers_live_on()
        with ExitStack() as stack:
            if kept_workers and not self._workers_live_on() and hasattr(self.base, "generator"):
                # In the resumed run these workers were reused, and drew no seed.
                stack.enter_context(swapped(self.base, "generator", torch.Generator()))
            if draw:
                stack.enter_context(order.replayed(generator, draws))
                if generator is not None and order.generator is None:
                    draw_as_one(order_sampler(self), generator, drawn_before=not kept_workers)
            return self._source.start(position.batches, draw, position.loader_state)

    def _workers_live_on(self) -> bool:
        """Whether worker processes of an earlier epoch are reused."""
        persistent = getattr(self.base, "persistent_workers", False)
        return persistent and getattr(self.base, "_iterator", None) is not None

    def _batches(self, info: BatchView) -> Iterator[Any]:
        """Start reading; each batch is recorded in `info` and in the position."""
        items = self._start(info)
        if self.options.fixed_batch is not None:
            items = self._filled(items, self.options.fixed_batch)
        return self._noted(items, info)

    def _noted(self, items: Iterator[Item], info: BatchView) -> Iterator[Any]:
        position = self._position
        per_step = self._source.per_step
        state = self.gradient_state
        restored = backwards = 0
        if state is not None and not self._skip:
            restored = position.batches
            backwards = state.backwards
        self._runs.append(info)
        try:
            for batch, last, real, data_state in self._on_device(items):
                info.last = last
                info.real = real
                if self._latest is not info:  # set once: DataLoader.__setattr__ is a Python call
                    self._latest = info
                if position.owner is info:
                    position.batches += per_step
                    position.ended = last
                    position.loader_state = data_state
                yield batch
                # `load_state_dict` leaves a position without an owner.
                if self._moved and position.owner in (info, None) and not position.ended:
                    position.owner = None
                    info.whole = self.total_batch_size
                    yield from self._batches(info)
                    return
            if position.owner is info:
                position.kept_workers = False
                position.start_of(position.epoch + 1)
                trained = state is not None and state.backwards > backwards
                if restored and not trained and torch.is_grad_enabled():
                    warn(_RESTORED.format(restored) + _TWICE)
        finally:
            self._runs[:] = [run for run in self._runs if run is not info]

    def _filled(self, items: Iterator[Item], multiple: int) -> Iterator[Item]:
        """Pad batches to the loader's size, and to a multiple, by repeating their own samples."""
        count = self.options.num_processes
        usual = (self.total_batch_size or 0) if count == 1 else 0
        for batch, last, real, state in items:
            size = batch_size_of(batch) or 0
            full = max(size, usual) if size else 0
            wanted = math.ceil(full / multiple) * multiple
            if wanted > size:
                check_fixed_batch(size, multiple, count)
                copies = math.ceil(wanted / size)
                repeated = concat_batches([batch] * copies)
                batch = slice_batch(repeated, slice(wanted), size * copies)
                real = size
            yield batch, last, real, state

    def _on_device(self, items: Iterator[Item]) -> Iterator[Item]:
        options = self.options
        if not options.put_on_device or options.device is None:
            return items
        if options.device.type == "cpu" and not options.feed_always:
            # If the first batch needs no move, neither do the others.
            first = list(islice(items, 1))
            items = chain(first, items)
            if not any(needs_move(batch, options.device) for batch, *_ in first):
                return items
        return self._fed(items)

    def _fed(self, items: Iterator[Item]) -> Iterator[Item]:
        options = self.options
        known: deque[list[Any]] = deque()

        def batches() -> Iterator[Any]:
            for batch, *rest in items:
                known.append(rest)
                yield batch

        # A feed may read ahead, so the facts about a batch are queued until it is yielded.
        device: Any = options.device
        move = options.feed
        if move is None:
            move = partial(feed, device=device, non_blocking=options.config.non_blocking)
        unmoved = batches()
        fed = move(unmoved)
        if fed is unmoved:  # the backend leaves batches where they are
            return items
        return ((batch, *known.popleft()) for batch in fed)


def check_fixed_batch(size: int, multiple: int, count: int) -> None:
    """Refuse a batch size that would pad batches in the middle of an epoch.

    Raises:
        ConfigurationError: on several ranks, `size` samples per rank are not divisible by `multiple`.
    """
    if count > 1 and size % multiple:
        raise ConfigurationError(
            f"The backend needs batches whose size is a multiple of {multiple}, and this loader has "
            f"batches of {size} samples per rank. On {count} ranks that read different data, only the "
            f"last batch of an epoch can be padded. Use a batch size of {size + -size % multiple} per "
            "rank, and even_batches=True or drop_last=True."
        )


class DataLoaderShard(CoreLoader):
    """A prepared loader that reads this rank's part of the data."""


class DataLoaderDispatcher(CoreLoader):
    """A prepared loader that rank 0 reads for all; each rank receives its part."""
