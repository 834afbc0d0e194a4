"""Planners that save and load sharded tensors with torch.distributed.checkpoint.

Shards are stored under the name of the whole tensor and their offset in it, so a checkpoint can be
read in another layout than the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorShard:
    """A rectangular part of a stored tensor, in memory.

    Attributes:
        key: name of the stored tensor.
        tensor: the values, in the shape of the shard.
        size: shape of the stored tensor.
        offset: position of the shard in the stored tensor.
        main: whether this is the copy to write, if several ranks hold the shard.
    """

    key: str
    tensor: torch.Tensor
    size: tuple[int, ...]
    offset: tuple[int, ...]
    main: bool = True

    @property
    def index(self) -> MetadataIndex:
        """The key under which the shard is stored."""
        return MetadataIndex(self.key, torch.Size(self.offset))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The position of the shard in the stored tensor."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


class TensorShardWriter(SavePlanner):
    """Writes shards. The rank with the main copy of a shard writes it."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = {shard.index: shard for shard in shards if shard.main}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the shards were passed to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Plan to write the main copies of this rank."""
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=shard.chunk,
                    properties=TensorProperties(dtype=shard.tensor.dtype),
                    size=torch.Size(shard.size),
                ),
            )
            for index, shard in self._shards.items()
        ]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        """Merge the plans of all ranks."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the tensor to write for an item of the plan."""
        return self._shards[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor


class TensorShardReader(DefaultLoadPlanner):
    """Reads shards in place, from a checkpoint saved in any layout.

    Args:
        shards: the shards to fill in.
        stored: the checkpoint's metadata of each key.
    """

    def __init__(self, shards: Sequence[TensorShard], stored: Mapping[str, Any]) -> None:
        super().__init__()
        self._stored = stored
        self._by_key: dict[str, list[TensorShard]] = {}
        for shard in shards:
            self._by_key.setdefault(shard.key, []).append(shard)

    def create_local_plan(self) -> LoadPlan:
        """Plan to read each shard of this rank."""
        items = []
        for key, shards in self._by_key.items():
            stored: Any = self._stored[key]
            items += create_read_items_for_chunk_list(key, stored, [s.chunk for s in shards])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        """Return the memory to read an item into.

        Args:
            read_item: describes the part to read.

        Raises:
            KeyError: no shard contains this part.
        """
        index = read_item.dest_index
        for shard in self._by_key[index.fqn]:
            if torch.Size(shard.offset) == index.offset:
                return self._narrowed(shard.tensor, read_item)
        raise KeyError(index)

    def _narrowed(self, tensor: torch.Tensor, item: Any) -> torch.Tensor:
        for dimension, (at, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, at, size)
        return tensor

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor was read in place."""
