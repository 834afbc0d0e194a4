"""Checkpoints of sharded tensors: planners for torch.distributed.checkpoint.

What is read is found by the name of a whole tensor and a shard of it, so any layout reads what another
one wrote.
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
    """A tensor in memory that is one rectangular part of a stored tensor.

    Attributes:
        key: name of the stored tensor.
        tensor: the values, in the shard's shape.
        size: shape of the stored tensor.
        offset: where the shard begins in it.
        main: whether this copy is the one that is written.
    """

    key: str
    tensor: torch.Tensor
    size: tuple[int, ...]
    offset: tuple[int, ...]
    main: bool = True

    @property
    def index(self) -> MetadataIndex:
        """By what it is found again."""
        return MetadataIndex(self.key, torch.Size(self.offset))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies in the whole."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


class TensorShardWriter(SavePlanner):
    """Writes shards; each is written by the rank that holds its main copy."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._shards = {shard.index: shard for shard in shards if shard.main}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Have all that is needed."""

    def create_local_plan(self) -> SavePlan:
        """Write what this rank is the first to hold."""
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
        """Put the plans of the ranks together."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return what is written."""
        return self._shards[MetadataIndex(write_item.index.fqn, write_item.index.offset)].tensor


class TensorShardReader(DefaultLoadPlanner):
    """Reads shards in place, whatever layout they were saved in.

    Args:
        shards: what is wanted here.
        stored: the checkpoint's metadata of each key.
    """

    def __init__(self, shards: Sequence[TensorShard], stored: Mapping[str, Any]) -> None:
        super().__init__()
        self._stored = stored
        self._by_key: dict[str, list[TensorShard]] = {}
        for shard in shards:
            self._by_key.setdefault(shard.key, []).append(shard)

    def create_local_plan(self) -> LoadPlan:
        """Read each shard of this rank."""
        items = []
        for key, shards in self._by_key.items():
            stored: Any = self._stored[key]
            items += create_read_items_for_chunk_list(key, stored, [b.chunk for b in shards])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        """Return where it is read to.

        Args:
            read_item: which part is read.

        Raises:
            KeyError: no shard contains it.
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
        """Nothing to do: it was read in place."""
