"""Read tensors of torch.distributed.checkpoint from their files into the memory of the model."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem


def read_in_place(
    directory: Path,
    places: Mapping[MetadataIndex, Any],
    items: Iterable[ReadItem],
    planner: LoadPlanner,
) -> list[ReadItem]:
    """Read what can be read without a copy, and return the other items.

    torch's reader allocates each stored tensor and copies it, even if a rank needs only a few rows of it.

    Args:
        places: the file, the offset and the length in bytes of each stored tensor.
    """
    from torch.distributed.checkpoint.planner import LoadItemType

    by_file: dict[str, list[ReadItem]] = {}
    others = []
    for item in items:
        place = places[item.storage_index]
        if item.type != LoadItemType.TENSOR or place.transform_descriptors:
            others.append(item)
        else:
            by_file.setdefault(place.relative_path, []).append(item)
    for name, found in by_file.items():
        with (directory / name).open("rb") as file:
            for item in found:
                target = planner.resolve_tensor(item).detach()
                if _read(file, places[item.storage_index], item, target):
                    planner.commit_tensor(item, target)
                else:
                    others.append(item)
    return others


def _read(file: io.BufferedReader, place: Any, item: ReadItem, target: torch.Tensor) -> bool:
    """Read an item into a tensor, unless its values have to be moved, converted or reordered on the way."""
    if not (_is_plain(target) and target.is_cpu and target.is_contiguous()):
        return False
    stored, start = _layout(file, place)
    if start is None:
        return False
    for dimension, (offset, length) in enumerate(
        zip(item.storage_offsets, item.lengths, strict=True)
    ):
        stored = stored.narrow(dimension, offset, length)
    fits = (stored.dtype, stored.shape) == (target.dtype, target.shape)
    if not fits or not stored.is_contiguous():
        return False
    if target.numel():
        memory = (ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())
        file.seek(start + int(stored.storage_offset()) * stored.element_size())
        if file.readinto(memory) != target.nbytes:
            raise EOFError(f"{file.name} ends within {item.storage_index.fqn!r}.")
    return True


def _layout(file: io.BufferedReader, place: Any) -> tuple[torch.Tensor, int | None]:
    """Return a stored tensor on the meta device, and where its storage begins in the file, if known."""
    from torch.distributed.checkpoint.utils import _create_file_view

    view = cast(Any, _create_file_view(file, place.offset, place.length))
    stored: torch.Tensor = torch.load(view, map_location="meta", weights_only=True)
    if not _is_plain(stored):
        return stored, None
    offset = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
    return stored, None if offset is None else place.offset + offset


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds nothing but the values, as they are."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
