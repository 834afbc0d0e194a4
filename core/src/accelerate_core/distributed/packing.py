"""Tensors of any shapes and dtypes as one run of bytes, and back.

Moving data between processes needs no arithmetic, so a collective need not know a dtype. A
`Layout` says where in a flat uint8 buffer each tensor lies; both ends compute it from shapes and
dtypes alone. A view of bytes as wider elements must be aligned, so the widest come first: then
every segment is, without gaps, and those of one dtype lie side by side.
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
    """Where one tensor lies in the buffer, in bytes, and what it is."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments of a buffer of `total` bytes, in the order of the tensors.

    `order` lists the tensors as they lie in the buffer, in runs of one dtype; `gap` is the number
    of bytes after the last.
    """

    segments: tuple[Segment, ...]
    total: int
    alignment: int
    order: tuple[tuple[int, ...], ...]
    gap: int


def layout_of(tensors: Iterable[torch.Tensor | TensorInformation]) -> Layout:
    """Lay out tensors; the same shapes and dtypes give the same layout everywhere."""
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
    """Return the buffer, uint8 [layout.total], that holds the tensors.

    A single contiguous tensor is not copied: the buffer then shares its memory.
    """
    if len(tensors) == 1:
        return _bytes(tensors[0], device)
    pieces = [_bytes(tensors[index], device) for run in layout.order for index in run]
    if layout.gap:
        pieces.append(torch.zeros(layout.gap, dtype=torch.uint8, device=device))
    return torch.cat(pieces)


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.device != device:
        tensor = tensor.to(device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return as_bytes(tensor if tensor.is_contiguous() else tensor.contiguous())


def unpack(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the tensors in a buffer as views of it."""
    buffer = _aligned(buffer, layout)
    return [
        buffer[segment.start : segment.stop].view(segment.dtype).view(segment.shape)
        for segment in layout.segments
    ]


def unpack_rows(buffer: torch.Tensor, layout: Layout, rows: int) -> list[torch.Tensor]:
    """Return the tensors in `rows` equal buffers that follow each other, joined on dimension 0.

    A 0-d tensor becomes one of shape [rows]. Each result has its own memory, save when it is the
    only one.
    """
    table = _aligned(buffer, layout).view(rows, layout.total)
    segments = layout.segments
    joined: list[torch.Tensor] = [table] * len(segments)
    for run in layout.order:
        dtype = segments[run[0]].dtype
        first, last = segments[run[0]].start, segments[run[-1]].stop
        # An empty view has arbitrary strides and cannot be seen as wider elements.
        bare = first == last or table.numel() == 0
        values = table.new_empty(rows, 0, dtype=dtype) if bare else table[:, first:last].view(dtype)
        if len(run) == 1:
            joined[run[0]] = values.reshape(_joined(segments[run[0]].shape, rows))
            continue
        sizes = [(segments[index].stop - segments[index].start) // dtype.itemsize for index in run]
        for index, piece in zip(run, values.split_with_sizes(sizes, 1), strict=True):
            joined[index] = piece.reshape(_joined(segments[index].shape, rows))
    return joined


def _joined(shape: torch.Size, rows: int) -> tuple[int, ...]:
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


def _aligned(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    # A backend may return a slice of something larger, which may start anywhere.
    return buffer.clone() if buffer.storage_offset() % layout.alignment else buffer
