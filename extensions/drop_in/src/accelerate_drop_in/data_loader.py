"""What the peer's `data_loader` module has, and the core does otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from accelerate_core.data.prepare import prepare_loader
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.distributed.process import current_runtime
from accelerate_core.distributed.torch_collectives import TorchCollectives, host_group


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
        dispatch_batches: rank 0 reads for all; None means for iterable datasets.
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
    settled = LoaderOptions(
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
    return prepare_loader(dataloader, settled)


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
        hooks=TorchCollectives(),
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


@functools.cache
def _read_as(kind: Any, read: Any) -> Any:
    return type(kind.__name__, (kind,), {"__class__": property(lambda _: read)})


def shown(loader: Any) -> Any:
    """Give a loader of `prepare` the class that the original's has: `isinstance` asks for it.

    It counts as one of the class that it reads, and on one process as a dispatcher if it was to be.
    """
    if isinstance(loader, CoreLoader):
        kind: Any = type(loader)
        read: Any = type(loader.base)
        if loader.options.config.dispatch_batches and kind is DataLoaderShard:
            kind = DataLoaderDispatcher
        if read is not DataLoader and issubclass(read, DataLoader) and not issubclass(read, kind):
            kind = _read_as(kind, read) if kind.__module__ == CoreLoader.__module__ else kind
        if kind is not type(loader):  # each `prepare` shows the earlier ones again
            object.__setattr__(loader, "__class__", kind)
    return loader
