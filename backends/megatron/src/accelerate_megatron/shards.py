"""Map this rank's parameters and optimizer state to shards of whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate_core.plugin import CheckpointError
from accelerate_megatron.library import imported


@dataclass(frozen=True)
class Part:
    """A contiguous range of a local tensor's elements, and the shard of a whole tensor it contains.

    Attributes:
        key: name of the whole tensor, the same on every rank.
        size: shape of the whole tensor.
        offset: where the shard begins in the whole tensor.
        shape: shape of the shard, with as many dimensions as `size`.
        start: flat index of the first element in the local tensor.
        replica: which copy of the shard this is. The last number counts data ranks. Only the copy
            with all zeros is written.
        padded: whether this is a vocabulary padded for tensor parallelism, whose size depends on the
            layout.
    """

    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    replica: tuple[int, ...]
    padded: bool = False

    def within(self, first: int, end: int) -> Iterator[Part]:
        """Yield the shards of this part that are in elements `first` to `end` of the local tensor."""
        low = max(first - self.start, 0)
        high = min(end - self.start, math.prod(self.shape))
        if low < high:
            for offset, shape, at in shards(self.shape, low, high):
                moved = tuple(a + b for a, b in zip(self.offset, offset, strict=True))
                yield replace(self, offset=moved, shape=shape, start=self.start + at)


def shards(
    shape: Sequence[int], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split the elements with flat indices `first` to `end` of a tensor into shards.

    Yields:
        The offset and the shape of each shard, and the flat index of its first element.
    """
    if not shape:
        yield (), (), 0
        return
    row = math.prod(shape[1:])
    line, rest = divmod(first, row)
    if rest or end - first < row:  # a part of one row
        stop = min(end, (line + 1) * row)
        for offset, size, at in shards(shape[1:], rest, stop - line * row):
            yield (line, *offset), (1, *size), line * row + at
        if stop < end:
            yield from shards(shape, stop, end)
        return
    lines = (end - first) // row
    yield (line, *(0 for _ in shape[1:])), (lines, *shape[1:]), first
    if first + lines * row < end:
        yield from shards(shape, first + lines * row, end)


def parts_of_plain(module: nn.Module, rank: int) -> dict[torch.Tensor, list[Part]]:
    """Return the parts of a module that every rank holds entirely, including its buffers."""
    state = module.state_dict(keep_vars=True)
    return {
        tensor: [Part(name, shape, (0,) * len(shape), shape, 0, (rank,))]
        for name, tensor in reversed(state.items())  # a tied tensor keeps its first name
        if isinstance(tensor, torch.Tensor)
        for shape in [tuple(tensor.shape)]
    }


def parts_of(chunks: Sequence[Any]) -> dict[torch.Tensor, list[Part]]:
    """Return the parts of the parameters in this rank's chunks, from `sharded_state_dict`.

    Raises:
        CheckpointError: the state dict contains a buffer.
    """
    mapping = imported("dist_checkpointing.mapping")
    found: dict[torch.Tensor, list[Part]] = {}
    for chunk in chunks:
        own = {id(parameter): parameter for parameter in chunk.parameters()}
        state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        for entry in _entries(state, mapping):
            parameter = own.get(id(entry.data))
            if parameter is None:
                if entry.data is not None and isinstance(entry, mapping.ShardedTensor):
                    raise CheckpointError(
                        f"{entry.key} is a buffer, but checkpoints of the backend megatron only "
                        "support parameters."
                    )
                continue
            found.setdefault(parameter, list(_parts(entry, parameter, mapping)))
    return found


def _entries(state: Any, mapping: Any) -> Iterator[Any]:
    if isinstance(state, mapping.ShardedBase):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _entries(value, mapping)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _entries(value, mapping)


def _parts(entry: Any, parameter: nn.Parameter, mapping: Any) -> Iterator[Part]:
    """Yield the parts of a parameter: one, or several if a factory splits it (gate and up)."""
    if isinstance(entry, mapping.ShardedTensor):
        yield _part(entry, 0)
        return
    data = parameter.detach()
    for one in _entries(entry.build_fn(entry.key, data, entry.replica_id, None), mapping):
        yield _part(one, one.data.storage_offset() - data.storage_offset())


def _part(entry: Any, start: int) -> Part:
    replica = entry.replica_id
    return Part(
        entry.key,
        tuple(entry.global_shape),
        tuple(entry.global_offset),
        (*(1,) * entry.prepend_axis_num, *entry.local_shape),
        start,
        replica if isinstance(replica, tuple) else (replica,),
        entry.allow_shape_mismatch,
    )
