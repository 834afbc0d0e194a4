"""The parts of Accelerate's module `data_loader` that differ from the core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate_core import DataLoaderConfiguration
from accelerate_core.data.loader import CoreLoader, DataLoaderDispatcher
from accelerate_core.data.order import Wrapper, iterate_from
from accelerate_core.data.resumable import ResumableReader, has_data_state
from accelerate_core.data.shard import IterableDatasetShard
from accelerate_core.data.sources import IndexedSource
from accelerate_core.distributed.process import current_runtime
from accelerate_core.plugin import (
    Communicator,
    DataLoaderShard,
    LoaderOptions,
    ReadSource,
    StepReader,
    TorchCollectives,
    bind_collectives,
    host_group,
    prepare_loader,
)
from accelerate_drop_in.continuation import continuation


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
    """Return a loader that yields this rank's part of the data, on its device.

    Args:
        dataloader: a `DataLoader`, or any iterable of batches.
        device, put_on_device, non_blocking: the device for batches (by default the process's), whether
            to move batches there, and whether to do so asynchronously.
        num_processes, process_index: the number of ranks and this rank; by default those of the process.
        split_batches: divide each batch of the loader among the ranks.
        rng_types: generators whose state rank 0 sends to the others before every iteration: "torch",
            "generator" (the sampler's or dataset's own) or a device type; None means `["generator"]`.
        dispatch_batches: rank 0 reads for all ranks; None means only for iterable datasets. If False,
            an iterable dataset with enough shards (`n_shards`, `shard`) is divided by shards instead of
            samples.
        even_batches: pad the last global step with samples from the start of the epoch.
        slice_fn_for_dispatch: a function `(data, tensor_slice, process_index=, num_processes=)` that
            returns a part of a batch.
        use_seedable_sampler, data_seed: shuffle by a seed and the epoch instead of a generator.
        use_stateful_dataloader: read through torchdata's `StatefulDataLoader`.
        torch_device_mesh: ranks that differ only in `tp`, `cp` or `sp` of this mesh get the same
            samples.
        read_ahead: when dispatching, read the next step on a thread during the current one. Pass False
            if the dataset must be read from the thread that created it.
        comm: the communicator of the ranks; by default the process group, if it is initialized.
        options: other fields of `accelerate_core.data.loader.LoaderOptions`.

    Raises:
        ConfigurationError: settings contradict the loader or each other.
        MissingPluginError: `use_stateful_dataloader` needs torchdata, which is not installed.

    Example:
        loader = prepare_data_loader(DataLoader(dataset, 8), num_processes=2, process_index=1)
    """
    continued = continuation()
    if continued is not None:
        made: CoreLoader = continued(
            dataloader,
            device=device,
            num_processes=num_processes,
            process_index=process_index,
            split_batches=split_batches,
            put_on_device=put_on_device,
            rng_types=rng_types,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=use_seedable_sampler,
            data_seed=data_seed,
            non_blocking=non_blocking,
            use_stateful_dataloader=use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
        )
        return made
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
    """Return a communicator for the default process group if that has `count` ranks and more than one."""
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
    """A batch sampler that skips the first `skip_batches` batches of another one."""

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
    """Doesn't read the state of the loader or dataset, because each rank reads other shards.

    A checkpoint only contains rank 0's state. Ranks resume by the number of batches instead, which is
    the same on all of them.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._asks_loader = False
        self._asks_dataset = False


def _read_shards(loader: CoreLoader) -> None:
    """Let a rank read its own shards of a stream, if there are enough, as Accelerate does.

    A stream has shards if it has `n_shards` and `shard(num_shards=, index=)`, as those of Hugging Face
    have. Batches are not repeated or padded, so ranks may have different numbers of batches.
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


#: Sets `__class__` even if `_read_as` has made it a property without a setter.
_set_class: Any = object.__dict__["__class__"].__set__


@functools.cache
def _read_as(kind: Any, read: Any) -> Any:
    return type(kind.__name__, (kind,), {"__class__": property(lambda _: read)})


def shown(loader: Any) -> Any:
    """Give a prepared loader the class that it has in Accelerate, for `isinstance`.

    It also passes as an instance of the class of the original loader. With `dispatch_batches`, it is a
    dispatcher even on one process. As in Accelerate, it calls `set_epoch` of samplers and datasets
    before every iteration.
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
    """Return the state of a torchdata loader after the last batch that was yielded."""
    state: dict[str, Any] | None = loader._position.loader_state
    if state is None:  # between epochs
        state = loader.base.state_dict()
        return state
    return state | ({"_iterator_finished": True} if loader.end_of_dataloader else {})


def _load_state(loader: Any, state_dict: dict[str, Any]) -> None:
    """Make the next iteration continue from the state of a torchdata loader."""
    loader._position.start_of(loader.iteration)
    streams = isinstance(loader.base.dataset, IterableDataset)
    if not streams or has_data_state(state_dict):
        loader.base.load_state_dict(state_dict)
    elif not state_dict["_iterator_finished"]:
        # From this state, torchdata would read the stream again and count each batch twice.
        loader._position.batches = _batches_in(state_dict)


def _batches_in(state_dict: dict[str, Any]) -> int:
    """Return how many batches a torchdata loader had yielded, without workers or with them."""
    if "_num_yielded" in state_dict:
        return int(state_dict["_num_yielded"])
    return int(state_dict["_snapshot"]["_snapshot_step"] + state_dict["_steps_since_snapshot"])


class _RecordingReader(ResumableReader):
    """Records the state of a torchdata loader even if its dataset has none."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self._counts_batches = False


@functools.cache
def _with_state_of_base(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"state_dict": _state, "load_state_dict": _load_state})


def with_state_of_base(loader: CoreLoader) -> CoreLoader:
    """If one process reads through a torchdata loader, use that loader's state instead of a position.

    Each can then resume from the other's state. Batches are read one ahead in this case.
    """
    base, source = loader.base, loader._source
    if not hasattr(type(base), "load_state_dict") or loader.options.num_processes > 1:
        return loader
    if isinstance(source, IndexedSource):
        plan = "sampler" if base.batch_sampler is None else "batch_sampler"
        object.__setattr__(base, plan, source.stream.plan)
        whole = StepReader(1, split_batches=False, even_batches=False, drop_last=False)
        loader._source = ReadSource(base, source.per_step, whole, 0)
    if isinstance(loader._source, ReadSource):
        loader._source.reader = _RecordingReader(base)
    kind: Any = type(loader)
    _set_class(loader, _with_state_of_base(kind))
    return loader
