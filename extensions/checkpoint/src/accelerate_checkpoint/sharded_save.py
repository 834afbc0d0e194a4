"""Save tensors in the format of torch.distributed.checkpoint (DCP), without planning on rank 0.

DCP's own `save` sends the plans of all ranks to rank 0 and back before any rank writes. But a rank can see
from a DTensor alone what it has to write. So here each rank plans for itself and writes, and rank 0 only
collects what the metadata file lists. DCP can read the files.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from accelerate_checkpoint.collect import collect
from accelerate_checkpoint.files import FileEntry
from accelerate_checkpoint.manifest import inner_name
from accelerate_checkpoint.shards import ChecksumWriter, without_crc32
from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

T = TypeVar("T")

#: At most this many replicas write. More would not be faster, and each adds files and messages to rank 0.
_WRITERS = 8


def save_sharded(
    tensors: Mapping[str, torch.Tensor], directory: Path, group: dist.ProcessGroup | None = None
) -> dict[str, FileEntry]:
    """Write this rank's part of a checkpoint, and return the checksums of the files that it wrote.

    All ranks must call this. DTensors are written by all ranks that hold a part of them, other tensors by
    rank 0. Rank 0 writes the metadata last.

    Args:
        tensors: DTensors and tensors by name, with the same names on all ranks.
        group: the group of all ranks for one small collective; None means the default group.

    Raises:
        CheckpointError: the parts of all ranks don't cover a tensor.
    """
    failure: Exception | None = None
    entries: dict[str, FileEntry] = {}
    sent: list[Any] = []
    try:
        sent = write_shards(tensors, directory, dist.get_rank(), entries)
    except Exception as error:
        failure = error
    failed = any_rank_failed(failure is not None, group)
    if failure is not None:
        raise failure
    if failed:
        return entries  # the rank that failed reports it
    first = dist.get_rank() == 0
    received = collect("shards", sent, range(dist.get_world_size()) if first else ())
    if first:
        write_metadata(received, directory, entries)
    return entries


def write_shards(
    tensors: Mapping[str, torch.Tensor], directory: Path, rank: int, entries: dict[str, FileEntry]
) -> list[Any]:
    """Write the parts of tensors that this rank has to write. Return what the metadata lists, as JSON.

    Args:
        entries: receives the checksums of the files.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    mine = {name: tensor for name, tensor in tensors.items() if writes_shard(name, tensor, rank)}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    plan = dataclasses.replace(
        planner.create_local_plan(), storage_data=_StoragePrefix(f"__{rank}_")
    )
    if not plan.items:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    with without_crc32():
        results = ChecksumWriter(directory, entries).write_data(planner.finish_plan(plan), planner)
    items = {item.index: item for item in plan.items}  # results come in another order
    return [shard_as_json(items[result.index], result) for result in results.wait()]


def shard_as_json(item: WriteItem, result: WriteResult) -> list[Any]:
    """Describe one written shard: what it is a part of, and where it was written."""
    data, place = item.tensor_data, result.storage_data
    assert data is not None, "only tensors are written"
    return [
        item.index.fqn,
        list(data.size),
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        str(data.properties.dtype).removeprefix("torch."),
        place.relative_path,
        place.offset,
        place.length,
    ]


def shard_from_json(content: Any) -> tuple[WriteItem, WriteResult]:
    """Return the shard that `shard_as_json` described.

    Raises:
        ValueError, TypeError: the content has another form.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    name, size, offsets, sizes, dtype, path, start, length = content
    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=kind), torch.Size(size))
    index = MetadataIndex(str(name), chunk.offsets)
    place = _StorageInfo(inner_name(str(path)), int(start), int(length))
    item = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
    return item, WriteResult(index, int(length), place)


def writes_shard(name: str, tensor: torch.Tensor, rank: int) -> bool:
    """Return whether this rank writes its part of a tensor, instead of another rank with the same part.

    Args:
        rank: the index of this process. Rank 0 writes tensors that are not sharded.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None:
        return False
    replica, replicas = 0, 1
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(number) + at[number]
            replicas *= mesh.size(number)
    # The names spread the tensors over the replicas.
    return zlib.crc32(name.encode()) % min(replicas, _WRITERS) == replica


def write_metadata(received: list[Any], directory: Path, entries: dict[str, FileEntry]) -> None:
    """Write DCP's metadata of what all ranks have written.

    Args:
        received: the results of `write_shards` on all ranks.
        entries: receives the checksum of the file.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan

    try:
        shards = [[shard_from_json(content) for content in sent] for sent in received if sent]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"A rank sent an invalid list of shards: {error}") from error
    plans = [SavePlan([item for item, _ in written]) for written in shards]
    results = [[result for _, result in written] for written in shards]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _, metadata = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"The shards of all ranks are incomplete: {error}") from error
    ChecksumWriter(directory, entries).finish(metadata, results)


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device on which a group can reduce: the CPU, if it is one of them."""
    among: Any = group or dist.group.WORLD
    kinds = [device.type for device in among._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def any_rank_failed(failed: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any rank of a group has failed. All of its ranks must call this."""
    flag = torch.tensor([failed], dtype=torch.int32, device=collective_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def run_together(job: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run a job on all ranks of a group. If it fails on any of them, raise the same error on all.

    Args:
        job: must not communicate, because the other ranks do not wait for one that has failed.

    Raises:
        CheckpointError: the first rank that failed, and why.
    """
    failure: Exception | None = None
    try:
        result = job()
    except Exception as error:
        failure = error
    if any_rank_failed(failure is not None, group):
        text = None
        if failure is not None:
            kind = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
            text = f"{kind}{failure}"
        texts: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        rank, first = next((rank, text) for rank, text in enumerate(texts) if text is not None)
        several = len(set(texts)) > 1
        raise CheckpointError(f"Rank {rank}: {first}" if several else first) from failure
    return result
