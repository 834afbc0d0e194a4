"""Prepare data loaders, and skip their first batches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from accelerate_core.data.dataset_check import check_same_data
from accelerate_core.data.loader import (
    CoreLoader,
    DataLoaderDispatcher,
    DataLoaderShard,
    LoaderOptions,
    check_fixed_batch,
)
from accelerate_core.data.order import SeedableRandomSampler, order_is_known, order_sampler
from accelerate_core.data.resumable import swapped
from accelerate_core.data.rng import RankedWorkerInit, check_rng_types, share_from_main
from accelerate_core.data.shard import BatchSamplerShard, ItemShard, IterableDatasetShard
from accelerate_core.data.shared_draws import SharedDraws
from accelerate_core.data.sources import BatchSource, IndexedSource, IndexStream, ReadSource
from accelerate_core.data.steps import StepReader, check_split
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.errors import ConfigurationError, MissingPluginError, warn
from accelerate_core.plugins.catalog import pip_command
from accelerate_core.plugins.discovery import exported

logger = logging.getLogger(__name__)


def prepare_loader(loader: Any, options: LoaderOptions) -> CoreLoader:
    """Return a loader that yields this rank's part of the data on its device.

    Args:
        loader: a `DataLoader`, or any iterable of batches.
        options: how data is split across the ranks, and the device of batches.

    With one process, the batches, their order and the random numbers are the same as without `prepare`. A
    prepared loader is returned unchanged. Batches that are already on the device are not copied.

    Raises:
        ConfigurationError: a setting contradicts the loader or another setting.
        MissingPluginError: a dispatched loader without accelerate-dispatch, or `use_stateful_dataloader`
            without accelerate-checkpoint or torchdata.

    Example:
        from accelerate_core.data.loader import LoaderOptions

        options = LoaderOptions(num_processes=2, process_index=1)
        loader = prepare_loader(DataLoader(dataset, batch_size=8), options)
    """
    if isinstance(loader, CoreLoader):
        return loader
    if not hasattr(loader, "__iter__"):
        raise ConfigurationError(
            f"A {type(loader).__name__} is not a data loader, because it cannot be iterated."
        )
    is_sharded = _is_sharded_already(loader, options.num_processes)
    if is_sharded:
        options = replace(options, num_processes=1, process_index=0)
    config = options.config
    count = options.num_processes
    order_comm = _order_comm(options)
    rng_types = check_rng_types(options.rng_types)
    options = replace(options, order_comm=order_comm, rng_types=rng_types)
    base = _copy(loader)
    if config.use_stateful_dataloader:
        base = exported("as_stateful_loader")(base)
    if config.use_seedable_sampler:
        _make_seedable(base, config.data_seed, order_comm)
    make_dispatched = _source_of_dispatch(config.dispatch_batches, base, count, options.comm)
    sampler = order_sampler(base)
    if make_dispatched is None and (count > 1 or order_comm is not None):
        _give_generator(base, sampler, order_comm)
        if isinstance(order_sampler(loader), SeedableRandomSampler):  # the user's own
            sampler.initial_seed = _same_seed(sampler.initial_seed, order_comm)
    if make_dispatched is None and count > 1 and order_comm is not None:
        check_same_data(getattr(base, "dataset", None), order_comm)
    batch_size = _batch_size(base)
    if config.split_batches and count > 1 and (batch_size is not None or _has_batch_sampler(base)):
        check_split(batch_size, count)
    if options.fixed_batch is not None and batch_size is not None:
        own = batch_size // count if config.split_batches else batch_size
        check_fixed_batch(own, options.fixed_batch, count)
    index = options.process_index
    view = _copy(base)  # keeps the attributes that this rank's part replaces
    steps = StepReader(
        count, config.split_batches, config.even_batches, _drops_last(base), batch_size=batch_size
    )
    if make_dispatched is not None:
        if isinstance(base, DataLoader):
            _replace(base, generator=None)  # only the order may be drawn from it
        reading = ReadSource(base, steps.per_step, steps, index, _indexed(base, _plan_of(base)))
        dispatched = make_dispatched(reading, options)
        return DataLoaderDispatcher(base, dispatched, view, loader, options, batch_size)
    steps.wanted = [index]
    source = _own_source(base, steps, index)
    workers = getattr(base, "num_workers", 0)
    if index > 0 and workers and isinstance(base, DataLoader):
        init = RankedWorkerInit(index * workers, base.worker_init_fn)
        _replace(base, worker_init_fn=init)
    if isinstance(source, IndexedSource):
        alike = None if is_sharded else order_comm
        _share_order(source.stream, alike, alike is None or "generator" in rng_types)
        _replace(view, **{_order_name(view): source.stream.plan})
    return DataLoaderShard(base, source, view, loader, options, batch_size)


def reshare(loader: CoreLoader, index: int, count: int) -> None:
    """Divide the rest of a loader's data over a different number of ranks.

    Raises:
        ConfigurationError: the loader does not read a map-style dataset by index.
    """
    old = getattr(loader, "_source", None)
    if not isinstance(old, IndexedSource):
        raise ConfigurationError(
            f"The data of {loader!r} cannot be split across a different number of ranks. Use a "
            "torch DataLoader with a map-style dataset, without dispatch_batches and without a loader plugin."
        )
    plan = _users_plan(old.stream.plan)
    options = replace(loader.options, num_processes=count, process_index=index)
    steps = StepReader(
        count, options.config.split_batches, loader.even_batches, _drops_last(loader)
    )
    steps.wanted = [index]
    base = _copy(loader.base)
    _replace(base, **{_order_name(base): plan})
    source = _own_source(base, steps, index)
    assert isinstance(source, IndexedSource), "the loader reads by index"
    _replace(loader, **{_order_name(loader): source.stream.plan})
    loader.read_on(source, options)


def _share_order(stream: IndexStream, comm: Communicator | None, is_synchronized: bool) -> None:
    """Let all ranks read rank 0's order, and keep what they compare.

    Two steps are kept; they are read before the first batch is returned in any case.

    Args:
        is_synchronized: whether rank 0 shares the sampler's generator at the start of every iteration.
    """
    plan = stream.plan
    if isinstance(plan, BatchSamplerShard) and comm is not None:
        plan.kept_steps = 2
    sampler = _users_plan(plan)
    if not (is_synchronized and order_is_known(sampler)):
        stream.draws = SharedDraws(sampler, comm)


def _users_plan(plan: Any) -> Any:
    """Return the sampler or batch sampler that the user's loader has."""
    if not isinstance(plan, BatchSamplerShard):
        return plan
    return plan.batch_sampler.sampler if isinstance(plan, ItemShard) else plan.batch_sampler


def _order_comm(options: LoaderOptions) -> Communicator | None:
    """Return the communicator of the ranks that read in one order, or None for a single rank."""
    comm = options.order_comm or (options.comm if options.num_processes > 1 else None)
    return None if comm is None or comm.size == 1 else comm


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first `num_batches` batches (per rank) of every iteration.

    Skipped map-style data is not loaded. The new loader shares epoch and position with the prepared
    one: `num_batches` counts from the start of the epoch, even after a position was loaded, and
    iterating over it advances the epoch of both.

    Raises:
        ConfigurationError: `num_batches` is negative.

    Example:
        for x, y in skip_first_batches(loader, 2):  # begins with the third batch
            loss = loss_function(model(x), y)
    """
    if num_batches < 0:
        raise ConfigurationError(f"num_batches={num_batches} must be 0 or more.")
    if not hasattr(dataloader, "skipping"):
        dataloader = prepare_loader(dataloader, LoaderOptions())
    return dataloader.skipping(num_batches)


@contextmanager
def override_even_batches(loaders: Iterable[Any], value: bool) -> Iterator[None]:
    """Override `even_batches` for iterations that begin inside the block.

    A stream that running workers read keeps its setting.
    """
    with ExitStack() as stack:
        for loader in loaders:
            if _is_iterable(loader) and getattr(loader, "persistent_workers", False):
                warn(
                    "even_batches cannot be overridden for an iterable dataset while its persistent "
                    "workers run."
                )
            stack.enter_context(swapped(loader, "even_batches", bool(value)))
        yield


def _order_name(loader: DataLoader[Any]) -> str:
    """Return the attribute that determines which samples a map-style loader reads."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _copy(loader: Any) -> Any:
    """Return a shallow copy without a running iterator. Other iterables are returned unchanged."""
    if not isinstance(loader, DataLoader):
        return loader
    clone = copy.copy(loader)
    clone.__dict__.update(_iterator=None)
    return clone


def _replace(loader: Any, **attributes: Any) -> bool:
    """Set attributes that `DataLoader` guards; return False if the class rejects them."""
    for name, value in attributes.items():
        try:
            object.__setattr__(loader, name, value)
        except AttributeError:
            return False
        if getattr(loader, name, None) is not value:
            return False
    return True


def _is_iterable(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _has_batch_sampler(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.batch_sampler is not None


def _iterates_plainly(loader: Any) -> bool:
    """Whether the loader yields exactly one batch for each entry of its sampler."""
    if not isinstance(loader, DataLoader):
        return False
    methods = (type(loader).__iter__, type(loader)._get_iterator)
    return all(method.__module__.startswith(("torch.", "torchdata.")) for method in methods)


def _batch_size(loader: Any) -> int | None:
    owners = [getattr(loader, "batch_sampler", None), loader]
    if isinstance(getattr(loader, "sampler", None), BatchSampler):
        owners = [loader.sampler, loader]
    sizes = (getattr(owner, "batch_size", None) for owner in owners)
    return next((size for size in sizes if isinstance(size, int)), None)


def _is_sharded_already(loader: Any, count: int) -> bool:
    samplers = [order_sampler(loader), getattr(loader, "batch_sampler", None)]
    divides = (getattr(sampler, "num_replicas", None) == count for sampler in samplers)
    if count == 1 or not any(divides):
        return False
    logger.warning(
        "The loader's sampler is a DistributedSampler, or similar, over %d ranks, so it is used "
        "unchanged. Without one, ranks read in the order of a single process, and metrics can be exact.",
        count,
    )
    return True


def _source_of_dispatch(
    asked: bool | None, loader: Any, count: int, comm: Communicator | None
) -> Callable[..., BatchSource] | None:
    """Return the class of sources that rank 0 reads for all ranks; None if each rank reads."""
    if count == 1:
        return None
    can = comm is not None and comm.size > 1
    if asked and not can:
        raise ConfigurationError(
            f"dispatch_batches=True with num_processes={count} needs a process group, and none is "
            "running. Start the script with a launcher, or remove dispatch_batches."
        )
    if not can or not (_is_iterable(loader) if asked is None else asked):
        return None
    try:
        source: Callable[..., BatchSource] = exported("DispatchedSource")
    except MissingPluginError as error:
        reason = "dispatch_batches=True" if asked else "An iterable dataset on several processes"
        raise MissingPluginError(
            f"{reason} needs accelerate-dispatch, with which rank 0 reads and sends each rank its "
            f"part. Install it with: {pip_command('dispatch')}. With dispatch_batches=False each "
            "rank reads the whole dataset and keeps its part."
        ) from error
    return source


def _make_seedable(loader: Any, data_seed: int | None, comm: Communicator | None) -> None:
    sampler = order_sampler(loader)
    is_random = isinstance(sampler, RandomSampler) or type(sampler).__name__ == "RandomSampler"
    if not is_random or isinstance(sampler, SeedableRandomSampler):
        return
    if data_seed is None:
        # Not drawn, because preparing must not advance the generator that weights come from.
        data_seed = _same_seed(torch.initial_seed() & (2**62 - 1), comm)
    seedable = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, data_seed=data_seed
    )
    _set_order_sampler(loader, seedable)


def _same_seed(seed: int, comm: Communicator | None) -> int:
    """Return rank 0's seed."""
    if comm is None:
        return seed
    share = share_from_main(comm)
    return int(share(torch.tensor([seed])).item())


def _give_generator(loader: Any, sampler: Any, comm: Communicator | None) -> None:
    """Add a generator to a sampler without one, with the same seed on all ranks."""
    is_one = isinstance(sampler, Sampler) and sampler is not getattr(loader, "batch_sampler", None)
    if not is_one or getattr(sampler, "generator", sampler) is not None:
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    shared: Any = copy.copy(sampler)
    shared.generator = torch.Generator()
    shared.generator.manual_seed(_same_seed(seed, comm))
    _set_order_sampler(loader, shared)


def _set_order_sampler(loader: Any, sampler: Any) -> None:
    for name in ("batch_sampler", "sampler"):
        holder = getattr(loader, name, None)
        if holder is not None and hasattr(holder, "sampler"):
            holder = copy.copy(holder)
            holder.sampler = sampler
            _replace(loader, **{name: holder})
        elif name == "sampler":
            _replace(loader, sampler=sampler)


def _drops_last(loader: Any) -> bool:
    default = getattr(loader, "drop_last", False)
    return bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", default))


def _plan_of(loader: Any) -> Any:
    """Return the object that yields the indices of a map-style loader; None if it follows none."""
    if _is_iterable(loader) or not _iterates_plainly(loader):
        return None
    return getattr(loader, _order_name(loader))


def _indexed(loader: Any, plan: Any) -> IndexStream | None:
    """Make a map-style loader read its indices from a plan; None if that is not possible."""
    if plan is None:
        return None
    stream = IndexStream(plan)
    return stream if _replace(loader, **{_order_name(loader): stream}) else None


def _own_source(base: Any, steps: StepReader, index: int) -> IndexedSource | ReadSource:
    """Make `base` read this rank's part, loading as little as possible."""
    count = steps.num_processes
    even = steps.even_batches
    plan = _plan_of(base)
    if count > 1 and plan is not None:
        if _has_batch_sampler(base) or isinstance(plan, BatchSampler):
            plan = BatchSamplerShard(plan, count, index, steps.split_batches, even)
        elif steps.split_batches:
            plan = None
        else:
            items = BatchSampler(plan, 1, drop_last=False)
            plan = ItemShard(items, count, index, even_batches=even)
    stream = _indexed(base, plan)
    if stream is not None:
        return IndexedSource(base, stream, steps.per_step)
    if count == 1 or _shard_stream(base, steps, index):
        whole = StepReader(1, split_batches=False, even_batches=False, drop_last=False)
        return ReadSource(base, steps.per_step, whole, 0)
    return ReadSource(base, steps.per_step, steps, index)


def _shard_stream(base: Any, steps: StepReader, index: int) -> bool:
    """Replace an iterable dataset by this rank's part of it; return whether that worked."""
    if not (_is_iterable(base) and _iterates_plainly(base)):
        return False
    size = base.batch_size
    count = steps.num_processes
    split = steps.split_batches
    if size is None and split:
        return False
    shard = IterableDatasetShard(
        base.dataset, size or 1, bool(base.drop_last), count, index, split, steps.even_batches
    )
    replaced = _replace(base, dataset=shard)
    if replaced and split:
        sampler: Any = copy.copy(base.batch_sampler)
        sampler.batch_size = size // count
        replaced = _replace(base, batch_size=sampler.batch_size, batch_sampler=sampler)
    return replaced
