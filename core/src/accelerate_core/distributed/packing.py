"""Pack tensors of any shapes and dtypes into one buffer of bytes, and unpack them.

Moving data between processes needs no arithmetic, so a collective does not have to know dtypes. A
`Layout` says where each tensor is in a flat uint8 buffer; sender and receiver compute it from
shapes and dtypes alone. A view of bytes as wider elements has to be aligned, so the widest dtypes
come first: every segment is then aligned without gaps, and tensors of one dtype are adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from accelerate_core.distributed.torch_collectives import as_bytes
from accelerate_core.distributed.tree import TensorInformation


@dataclass(frozen=True, slots=True)
class Segment:
    """The position of one tensor in the buffer, in bytes, with its shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each tensor in a buffer of `total` bytes. `segments` follows the order of the tensors.

    `order` lists the tensors by position in the buffer, grouped by dtype. `gap` is the number of
    unused bytes at the end.
    """

    segments: tuple[Segment, ...]
    total: int
    alignment: int
    order: tuple[tuple[int, ...], ...]
    gap: int


def layout_of(tensors: Iterable[torch.Tensor | TensorInformation]) -> Layout:
    """Return the layout for tensors. Equal shapes and dtypes have equal layouts on every rank."""
    return _layout(tuple([(tensor.shape, tensor.dtype) for tensor in tensors]))


@lru_cache(maxsize=256)
def _layout(infos: tuple[tuple[torch.Size, torch.dtype], ...]) -> Layout:
    def key(index: int) -> tuple[int, str]:
        dtype = infos[index][1]
        return -dtype.itemsize, str(dtype)

    order = tuple(tuple(run) for _, run in groupby(sorted(range(len(infos)), key=key), key=key))
    segments: dict[int, Segment] = {}
    offset = 0
    for run in order:
        for index in run:
            shape, dtype = infos[index]
            stop = offset + math.prod(shape) * dtype.itemsize
            segments[index] = Segment(shape, dtype, offset, stop)
            offset = stop
    alignment = max((dtype.itemsize for _, dtype in infos), default=1)
    total = math.ceil(offset / alignment) * alignment
    in_order = tuple(segments[index] for index in range(len(infos)))
    return Layout(in_order, total, alignment, order, total - offset)


def pack(tensors: Sequence[torch.Tensor], layout: Layout, device: torch.device) -> torch.Tensor:
    """Copy tensors into one buffer, a uint8 tensor of shape [layout.total].

    A single contiguous tensor is not copied; the buffer shares its memory.
    """
    pieces = bytes_of(tensors, layout, device)
    if len(tensors) == 1:
        return pieces[0]
    if layout.gap or not pieces:
        pieces.append(torch.zeros(layout.gap, dtype=torch.uint8, device=device))
    return torch.cat(pieces)


def bytes_of(
    tensors: Sequence[torch.Tensor], layout: Layout, device: torch.device
) -> list[torch.Tensor]:
    """Return the bytes of each tensor, in the order of the layout."""
    return [_bytes(tensors[index], device) for run in layout.order for index in run]


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device != device:
        tensor = tensor.to(device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return as_bytes(tensor if tensor.is_contiguous() else tensor.contiguous())


def unpack(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the tensors in a buffer, as views of the buffer."""
    buffer = aligned(buffer, layout.alignment)
    return [
        buffer[segment.start : segment.stop].view(segment.dtype).view(segment.shape)
        for segment in layout.segments
    ]


def unpack_rows(table: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Join the tensors in the rows of a table of bytes on dimension 0.

    Rows may be longer than the layout. 0-d tensors become one tensor with an element for each row. Each
    result has its own memory, unless the layout has only one tensor.
    """
    count = len(table)
    segments = layout.segments
    joined: list[torch.Tensor] = [table] * len(segments)
    for run in layout.order:
        dtype = segments[run[0]].dtype
        first, last = segments[run[0]].start, segments[run[-1]].stop
        # An empty view has arbitrary strides, so it cannot be viewed as a wider dtype.
        bare = first == last or table.numel() == 0
        values = (
            table.new_empty(count, 0, dtype=dtype) if bare else table[:, first:last].view(dtype)
        )
        if len(run) == 1:
            joined[run[0]] = values.reshape(_joined(segments[run[0]].shape, count))
            continue
        sizes = [(segments[index].stop - segments[index].start) // dtype.itemsize for index in run]
        for index, piece in zip(run, values.split_with_sizes(sizes, 1), strict=True):
            joined[index] = piece.reshape(_joined(segments[index].shape, count))
    return joined


def _joined(shape: torch.Size, rows: int) -> tuple[int, ...]:
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


def aligned(buffer: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return the buffer, or a copy if its memory doesn't have the alignment."""
    # A backend may return a slice of a larger tensor, at any offset.
    return buffer.clone() if buffer.storage_offset() % alignment else buffer
