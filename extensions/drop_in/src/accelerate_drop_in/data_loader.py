"""What Accelerate's `data_loader` module has, and the core does otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.data.loader import (
    CoreLoader,
    DataLoaderDispatcher,
    DataLoaderShard,
    LoaderOptions,
)
from accelerate_core.data.order import Wrapper, iterate_from
from accelerate_core.data.prepare_loader import prepare_loader
from accelerate_core.data.resumable import ResumableReader
from accelerate_core.data.shard import IterableDatasetShard
from accelerate_core.data.sources import IndexedSource, ReadSource
from accelerate_core.data.steps import StepReader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import current_runtime
from accelerate_core.distributed.torch_collectives import (
    TorchCollectives,
    bind_collectives,
    host_group,
)


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
    torch_device_mesh: Any = None,
    *,
    read_ahead: bool = True,
    comm: Communicator | None = None,
    **options: Any,
) -> CoreLoader:
    """Return a loader that gives this rank its part of the data, on its device.

    Args:
        dataloader: a `DataLoader`, or any iterable of batches.
        device, put_on_device, non_blocking: where the batches go (the process's device by default),
            whether, and how.
        num_processes, process_index: the rank's place, by default that of the process.
        split_batches: the loader's batch size is that of all ranks together.
        rng_types: generators whose state rank 0 shares at the start of every iteration: "torch",
            "generator" (the sampler's or dataset's own) or a device type; `["generator"]` if None.
        dispatch_batches: rank 0 reads for all; None means for iterable datasets. Else a stream of
            enough shards (`n_shards`, `shard`) is read by shards, not sample by sample.
        even_batches: fill up the last global step from the start of the epoch.
        slice_fn_for_dispatch: `(data, tensor_slice, process_index=, num_processes=)` -> part.
        use_seedable_sampler, data_seed: shuffle by a seed and the epoch instead of a generator.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        torch_device_mesh: ranks that differ in its `tp`, `cp` or `sp` only get the same samples.
        read_ahead: when dispatching, read the next step on a thread while this one is worked on;
            False for a dataset that only the thread that made it may use.
        comm: how the ranks communicate; without it, and outside a process group, they do not.
        options: more of `accelerate_core.data.loader.LoaderOptions`.

    Raises:
        ConfigurationError: settings that do not fit the loader or each other.
        MissingPluginError: `use_stateful_dataloader` without torchdata.

    Example:
        loader = prepare_data_loader(DataLoader(dataset, 8), num_processes=2, process_index=1)
    """
    count = current_runtime().num_processes if num_processes is None else num_processes
    index = current_runtime().process_index if process_index is None else process_index
    alike = [one for one in ("tp", "cp", "sp") if one in _names_of(torch_device_mesh)]
    for name in alike:
        size = torch_device_mesh[name].size()
        count, index = count // size, index // size
    if put_on_device and device is None:
        device = current_runtime().device
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        read_ahead=read_ahead,
    )
    loader_options = LoaderOptions(
        config=config,
        num_processes=count,
        process_index=index,
        device=None if device is None else torch.device(device),
        put_on_device=put_on_device,
        rng_types=rng_types,
        slice_fn_for_dispatch=slice_fn_for_dispatch,
        comm=_default_communicator(count) if comm is None else comm,
        **options,
    )
    made = prepare_loader(dataloader, loader_options)
    _read_shards(made)
    return made


def _names_of(mesh: Any) -> tuple[str, ...]:
    return () if mesh is None else mesh.mesh_dim_names or ()


def _default_communicator(count: int) -> Communicator | None:
    """Return one over the default process group if it has as many ranks, and more than one."""
    if count == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.get_world_size() != count:
        return None
    runtime = current_runtime()
    return Communicator(
        rank=dist.get_rank(),
        size=count,
        device=runtime.device,
        hooks=bind_collectives(TorchCollectives()),
        new_group=lambda ranks: host_group(ranks, runtime.timeout),
    )


@dataclass(eq=False, repr=False)
class SkipBatchSampler(Wrapper, BatchSampler):
    """A batch sampler without the first `skip_batches` batches of another one."""

    own_names = ("batch_sampler",)

    batch_sampler: Any
    skip_batches: int = 0

    def __iter__(self) -> Iterator[Any]:
        return iterate_from(self.batch_sampler, self.skip_batches)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    @property
    def total_length(self) -> int:
        """Number of batches without skipping."""
        return len(self.batch_sampler)


class _CountingReader(ResumableReader):
    """Asks nobody for a state: a checkpoint has rank 0's for all, who read other shards.

    They go on by the number of batches, which is the same on each.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._asks_loader = False
        self._asks_dataset = False


def _read_shards(loader: CoreLoader) -> None:
    """Let a rank read its own shards of a stream, as the original does where there are enough.

    Streams have them that have `n_shards` and `shard(num_shards=, index=)`, as Hugging Face's. Nothing
    is read twice or filled up, so ranks may have different numbers of batches.
    """
    base: Any = loader.base
    source: Any = loader._source
    part = getattr(base, "dataset", None)
    if not isinstance(part, IterableDatasetShard) or part is loader._users.dataset:
        return
    stream, count = part.dataset, part.num_processes
    shards = getattr(stream, "n_shards", None)
    enough = isinstance(shards, int) and shards >= count and not part.split_batches
    if enough and callable(getattr(stream, "shard", None)):
        shard = stream.shard(num_shards=count, index=part.process_index)
        object.__setattr__(base, "dataset", shard)
        reading = ReadSource(base, 1, source.steps, 0)
        reading.reader = _CountingReader(base)
        loader._source = reading
        loader.options = replace(loader.options, num_processes=1, process_index=0)


#: Works again where `_read_as` has made `__class__` a property, which has no setter.
_set_class: Any = object.__dict__["__class__"].__set__


@functools.cache
def _read_as(kind: Any, read: Any) -> Any:
    return type(kind.__name__, (kind,), {"__class__": property(lambda _: read)})


def shown(loader: Any) -> Any:
    """Give a loader of `prepare` the class that the original's has: `isinstance` asks for it.

    It counts as one of the class that it reads, and on one process as a dispatcher if it was to be.
    Like the original's, it calls `set_epoch` of samplers and datasets at the start of every iteration.
    """
    if isinstance(loader, CoreLoader):
        loader.options = replace(loader.options, sets_epoch=True)
        _read_shards(loader)
        kind: Any = type(loader)
        read: Any = type(loader.base)
        if loader.options.config.dispatch_batches and kind is DataLoaderShard:
            kind = DataLoaderDispatcher
        if read is not DataLoader and issubclass(read, DataLoader) and not issubclass(read, kind):
            kind = _read_as(kind, read) if kind.__module__ == CoreLoader.__module__ else kind
        _set_class(loader, kind)
    return loader


def _state(loader: Any) -> dict[str, Any]:
    """Return what a loader of torchdata's goes on from behind the batch that was handed out last."""
    state: dict[str, Any] | None = loader._position.loader_state
    if state is None:  # between epochs
        state = loader.base.state_dict()
        return state
    return state | ({"_iterator_finished": True} if loader.end_of_dataloader else {})


def _load_state(loader: Any, state_dict: dict[str, Any]) -> None:
    """Continue, at the next iteration, where a loader of torchdata's was."""
    loader._position.start_of(loader.iteration)
    loader.base.load_state_dict(state_dict)


@functools.cache
def _with_state_of_base(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"state_dict": _state, "load_state_dict": _load_state})


def with_state_of_base(loader: CoreLoader) -> CoreLoader:
    """Let a loader that one process reads through torchdata's have its state, not a position of ours.

    So either can go on from the other's state. Its batches are then read one ahead.
    """
    base, source = loader.base, loader._source
    if not hasattr(type(base), "load_state_dict") or loader.options.num_processes > 1:
        return loader
    if isinstance(source, IndexedSource):
        plan = "sampler" if base.batch_sampler is None else "batch_sampler"
        object.__setattr__(base, plan, source.stream.plan)
        whole = StepReader(1, split_batches=False, even_batches=False, drop_last=False)
        loader._source = ReadSource(base, source.per_step, whole, 0)
    kind: Any = type(loader)
    _set_class(loader, _with_state_of_base(kind))
    return loader
