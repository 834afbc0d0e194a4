"""Turn a user's loader into a prepared one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from accelerate_core.data.loader import DataLoaderDispatcher, DataLoaderShard, Feed, PreparedLoader
from accelerate_core.data.order import (
    SeedableRandomSampler,
    SharedOrderSampler,
    draws_from_torch,
    order_sampler,
)
from accelerate_core.data.rng import RankedWorkerInit, check_rng_types, share_from_main
from accelerate_core.data.shard import (
    BatchSamplerShard,
    ItemShard,
    IterableDatasetShard,
    check_rank,
    check_split,
)
from accelerate_core.data.sources import (
    DealtSource,
    DispatchedSource,
    IndexedSource,
    IndexStream,
    Source,
    StreamSource,
)
from accelerate_core.data.steps import StepReader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import current_runtime
from accelerate_core.distributed.torch_collectives import TorchCollectives, host_group
from accelerate_core.errors import ConfigurationError, MissingPluginError
from accelerate_core.training.gradient_state import GradientState

logger = logging.getLogger(__name__)


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    *,
    comm: Communicator | None = None,
    order_comm: Communicator | None = None,
    gradient_state: GradientState | None = None,
    feed: Feed | None = None,
    feed_always: bool = False,
    read_ahead: bool = True,
) -> PreparedLoader:
    """Return a loader that gives this rank its part of the data, on its device.

    Args:
        dataloader: a `DataLoader`, or any iterable of batches.
        device, put_on_device, non_blocking: where the batches go (the process's device by default),
            whether, and how.
        num_processes, process_index: the rank's place, by default that of the process.
        split_batches: the loader's batch size is that of all ranks together.
        rng_types: generators whose state rank 0 shares at the start of every iteration: "torch",
            "generator" (the sampler's or dataset's own) or a device type; `["generator"]` if None.
        dispatch_batches: rank 0 reads for all; None means for iterable datasets.
        even_batches: fill up the last global step from the start of the epoch.
        slice_fn_for_dispatch: `(data, tensor_slice, process_index=, num_processes=)` -> part.
        use_seedable_sampler, data_seed: shuffle by a seed and the epoch instead of a generator.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        comm: how the ranks talk; without it, and outside a process group, they do not.
        order_comm: how all ranks agree on an order, where several read the same part and `comm`
            joins only those that read different ones; default `comm`.
        gradient_state: is told of iterations and batches.
        feed: iterator of batches -> iterator of batches on the device, for `put_on_device`.
        feed_always: call it where the batches are on the device already, too.
        read_ahead: when dispatching, read the next step on a thread while this one is worked on;
            False for a dataset that only the thread that made it may use.

    With one process the batches, their order and the random numbers drawn are those of the plain
    loader. A prepared loader is returned as it is. Batches need not be moved are not touched.

    Raises:
        ConfigurationError: settings that do not fit the loader or each other.
        MissingPluginError: `use_stateful_dataloader` without torchdata.

        loader = prepare_data_loader(DataLoader(dataset, 8), num_processes=2, process_index=1)
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    if not hasattr(dataloader, "__iter__"):
        raise ConfigurationError(
            f"A {type(dataloader).__name__} is no data loader: it cannot be iterated."
        )
    count = current_runtime().num_processes if num_processes is None else num_processes
    index = current_runtime().process_index if process_index is None else process_index
    check_rank(count, index)
    if put_on_device and device is None:
        device = current_runtime().device
    if _is_sharded_already(dataloader, count):
        count, index = 1, 0
    if comm is None and count > 1:
        comm = _default_communicator(count)
    order_comm = order_comm or (comm if count > 1 else None)
    names = check_rng_types(rng_types)
    base = _copy(dataloader)
    if use_stateful_dataloader:
        base = _as_stateful(base)
    if use_seedable_sampler:
        _make_seedable(base, data_seed, order_comm)
    dispatches = _dispatches(dispatch_batches, base, count, comm)
    if not dispatches and order_comm is not None and order_comm.size > 1:
        _share_order(base, order_comm)
    batch_size = _batch_size(base)
    if split_batches and count > 1 and (batch_size is not None or _has_batch_sampler(base)):
        check_split(batch_size, count)
    original = _copy(base)  # the attributes as they are before this rank's part replaces them
    kind: type[PreparedLoader] = DataLoaderDispatcher if dispatches else DataLoaderShard
    slice_fn, wanted = (slice_fn_for_dispatch, None) if dispatches else (None, [index])
    drop_last = _drops_last(base)
    steps = StepReader(count, split_batches, even_batches, drop_last, slice_fn, wanted, batch_size)
    if dispatches:
        assert comm is not None
        source: Source = _dispatched_source(base, steps, index, comm, read_ahead)
    else:
        source = _own_source(base, steps, index)
        workers = getattr(base, "num_workers", 0)
        if index > 0 and workers and isinstance(base, DataLoader):
            init = RankedWorkerInit(index * workers, base.worker_init_fn)
            _replace(base, worker_init_fn=init)
    batch_sampler, sampler = _attr(original, "batch_sampler"), _attr(original, "sampler")
    if isinstance(source, IndexedSource):
        if batch_sampler is None:
            sampler = source.stream.plan
        else:
            batch_sampler = source.stream.plan
    return kind(
        base,
        source,
        original,
        dataloader,
        batch_sampler,
        sampler,
        num_processes=count,
        process_index=index,
        split_batches=split_batches,
        _batch_size=batch_size,
        device=torch.device(device) if device is not None else None,
        put_on_device=put_on_device,
        non_blocking=non_blocking,
        rng_types=names,
        comm=comm,
        order_comm=order_comm,
        gradient_state=gradient_state,
        _feed=feed,
        _feed_always=feed_always,
    )


def _attr(loader: Any, name: str) -> Any:
    return getattr(loader, name, None)


def _default_communicator(count: int) -> Communicator | None:
    """Return one over the default process group if it has as many ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == count):
        return None
    runtime = current_runtime()
    return Communicator(
        rank=dist.get_rank(),
        size=count,
        device=runtime.device,
        hooks=TorchCollectives(),
        new_group=lambda ranks: host_group(ranks, runtime.timeout),
    )


def _copy(loader: Any) -> Any:
    """Return a shallow copy without a running iterator; what cannot be copied is used itself."""
    if not isinstance(loader, DataLoader):
        return loader
    clone = copy.copy(loader)
    if clone.__dict__.get("_iterator") is not None:
        clone.__dict__["_iterator"] = None
    return clone


def _as_stateful(loader: Any) -> Any:
    """Return a copy of the user's loader as torchdata's `StatefulDataLoader`."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise MissingPluginError(
            "use_stateful_dataloader=True needs torchdata, which is not installed. "
            'Run: pip install "accelerate-core[stateful]"'
        ) from error
    if isinstance(loader, StatefulDataLoader):
        return loader
    kind: Any = type(loader)
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(
            f"use_stateful_dataloader=True needs a torch DataLoader, not a {kind.__name__}."
        )
    stateful: Any = StatefulDataLoader
    if kind is not DataLoader:
        stateful = type(f"Stateful{kind.__name__}", (kind, StatefulDataLoader), {})
    clone = stateful.__new__(stateful)
    missing = {"snapshot_every_n_steps": 1, "next_iter_state": None}
    missing["_initial_iter_for_state_dict"] = False
    clone.__dict__.update(missing | loader.__dict__, _iterator=None)
    return clone


def _replace(loader: Any, **attributes: Any) -> bool:
    """Set attributes that `DataLoader` guards; False if the class does not let itself be told."""
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
    """Whether the loader's batches are exactly those its sampler names, one for one."""
    if not isinstance(loader, DataLoader):
        return False
    return all(
        "__iter__" not in vars(kind) and "_get_iterator" not in vars(kind)
        for kind in type(loader).__mro__
        if kind is not DataLoader
        and issubclass(kind, DataLoader)
        and not kind.__module__.startswith("torchdata.")
    )


def _batch_size(loader: Any) -> int | None:
    sampler = _attr(loader, "sampler")
    batch_sampler = sampler if isinstance(sampler, BatchSampler) else _attr(loader, "batch_sampler")
    for owner in (batch_sampler, loader):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _is_sharded_already(loader: Any, count: int) -> bool:
    sampler = order_sampler(loader)
    if count == 1 or not isinstance(sampler, DistributedSampler) or sampler.num_replicas != count:
        return False
    logger.warning(
        "The loader has a DistributedSampler over %d ranks, so it is used as it is. Without one "
        "the data is dealt in the order of a single process and exact metrics are possible.",
        count,
    )
    return True


def _dispatches(asked: bool | None, loader: Any, count: int, comm: Communicator | None) -> bool:
    if count == 1:
        return False
    can = comm is not None and comm.size > 1
    if asked and not can:
        raise ConfigurationError(
            f"dispatch_batches=True with num_processes={count} needs a process group, and this "
            "process is in none: start the script with a launcher, or leave dispatch_batches out."
        )
    return can and (_is_iterable(loader) if asked is None else asked)


def _make_seedable(loader: Any, data_seed: int | None, comm: Communicator | None) -> None:
    sampler = order_sampler(loader)
    is_random = isinstance(sampler, RandomSampler) or type(sampler).__name__ == "RandomSampler"
    if not is_random or isinstance(sampler, SeedableRandomSampler):
        return
    if data_seed is None:
        # Not a draw: preparing must not move the stream that the weights come from.
        seed = (sampler.generator or torch.default_generator).initial_seed() & (2**62 - 1)
        if comm is not None and comm.size > 1:
            seed = int(share_from_main(comm)(torch.tensor([seed])).item())
        data_seed = seed
    seedable = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, data_seed=data_seed
    )
    _set_order_sampler(loader, seedable)


def _share_order(loader: Any, comm: Communicator) -> None:
    sampler = order_sampler(loader)
    if draws_from_torch(sampler):
        _set_order_sampler(loader, SharedOrderSampler(sampler, share_from_main(comm)))


def _set_order_sampler(loader: Any, sampler: Any) -> None:
    for name in ("batch_sampler", "sampler"):
        holder = _attr(loader, name)
        if holder is not None and hasattr(holder, "sampler"):
            holder = copy.copy(holder)
            holder.sampler = sampler
            _replace(loader, **{name: holder})
        elif name == "sampler":
            _replace(loader, sampler=sampler)


def _drops_last(loader: Any) -> bool:
    default = getattr(loader, "drop_last", False)
    return bool(getattr(_attr(loader, "batch_sampler"), "drop_last", default))


def _indexed(loader: Any, plan: Any) -> IndexStream | None:
    """Let a map-style loader read its indices from a plan; None if it cannot be told to."""
    stream = IndexStream(plan)
    name = "batch_sampler" if _has_batch_sampler(loader) else "sampler"
    return stream if _replace(loader, **{name: stream}) else None


def _plan_of(loader: Any) -> Any:
    """Return what names the indices of a map-style loader that follows them, else None."""
    if not isinstance(loader, DataLoader) or _is_iterable(loader) or not _iterates_plainly(loader):
        return None
    return loader.batch_sampler if _has_batch_sampler(loader) else loader.sampler


def _dispatched_source(
    base: Any, steps: StepReader, index: int, comm: Communicator, read_ahead: bool
) -> DispatchedSource:
    plan = _plan_of(base)
    stream = None if plan is None else _indexed(base, plan)
    shards = list(range(comm.size))
    if comm.size != steps.num_processes or index != comm.rank:
        shards = comm.gather_object(index)
    return DispatchedSource(base, stream, steps, index, comm, shards, read_ahead)


def _own_source(base: Any, steps: StepReader, index: int) -> Source:
    """Make `base` read this rank's part, in the way that loads least."""
    count, split_batches = steps.num_processes, steps.split_batches
    plan = _plan_of(base)
    if plan is not None:
        in_batches = _has_batch_sampler(base) or isinstance(plan, BatchSampler)
        if count > 1 and in_batches:
            plan = BatchSamplerShard(plan, count, index, split_batches, steps.even_batches)
        elif count > 1:
            plan = None if split_batches else ItemShard(plan, count, index, steps.even_batches)
        stream = None if plan is None else _indexed(base, plan)
        if stream is not None:
            return IndexedSource(base, stream, steps.per_step)
    if count == 1 or _shard_stream(base, steps, index):
        return StreamSource(base, steps.per_step)
    return DealtSource(base, steps, index)


def _shard_stream(base: Any, steps: StepReader, index: int) -> bool:
    """Put the rank's share of a stream in the place of the dataset, if the loader has one."""
    if not (isinstance(base, DataLoader) and _is_iterable(base) and _iterates_plainly(base)):
        return False
    size, count, split = base.batch_size, steps.num_processes, steps.split_batches
    if size is None and split:
        return False
    shard = IterableDatasetShard(
        base.dataset, size or 1, bool(base.drop_last), count, index, split, steps.even_batches
    )
    replaced = _replace(base, dataset=shard)
    if replaced and split:
        sampler: Any = copy.copy(base.batch_sampler)
        sampler.batch_size = size // count  # type: ignore[operator]
        replaced = _replace(base, batch_size=sampler.batch_size, batch_sampler=sampler)
    return replaced
