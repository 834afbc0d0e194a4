"""Tensors of any shapes and dtypes as one run of bytes, and back.

Moving data between processes needs no arithmetic, so a collective need not know a dtype. A
`Layout` says where in a flat uint8 buffer each tensor lies; both ends compute it from shapes and
dtypes alone. Every segment starts on a multiple of the widest element, since a view of bytes as
wider elements must be aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from accelerate_core.nested import TensorInformation
from accelerate_core.torch_talk import as_bytes

__all__ = ["Layout", "Segment", "layout_of", "pack", "unpack", "unpack_rows"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one tensor lies in the buffer, in bytes, and what it is."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments of a buffer of `total` bytes."""

    segments: tuple[Segment, ...]
    total: int
    alignment: int


def layout_of(tensors: Iterable[torch.Tensor | TensorInformation]) -> Layout:
    """Lay out tensors in a row; the same shapes and dtypes give the same layout everywhere."""
    infos = [(tensor.shape, tensor.dtype) for tensor in tensors]
    alignment = max((dtype.itemsize for _, dtype in infos), default=1)
    segments = []
    offset = 0
    for shape, dtype in infos:
        stop = offset + math.prod(shape) * dtype.itemsize
        segments.append(Segment(shape, dtype, offset, stop))
        offset = math.ceil(stop / alignment) * alignment
    return Layout(tuple(segments), offset, alignment)


def pack(tensors: Sequence[torch.Tensor], layout: Layout, device: torch.device) -> torch.Tensor:
    """Return the buffer, uint8 [layout.total], that holds the tensors.

    A single contiguous tensor is not copied: the buffer then shares its memory.
    """
    if len(tensors) == 1:
        return as_bytes(tensors[0].detach().to(device).resolve_conj().resolve_neg().contiguous())
    buffer = torch.empty(layout.total, dtype=torch.uint8, device=device)
    for tensor, place in zip(tensors, unpack(buffer, layout), strict=True):
        place.copy_(tensor.detach())
    return buffer


def unpack(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the tensors in a buffer as views of it."""
    buffer = _aligned(buffer, layout)
    return [
        buffer[place.start : place.stop].view(place.dtype).view(place.shape)
        for place in layout.segments
    ]


def unpack_rows(buffer: torch.Tensor, layout: Layout, rows: int) -> list[torch.Tensor]:
    """Return the tensors in `rows` equal buffers that follow each other, joined on dimension 0.

    A 0-d tensor becomes one of shape [rows]. Each result has its own memory, save when it is the
    only one.
    """
    table = _aligned(buffer, layout).view(rows, layout.total)
    return [_segment(table, place).reshape(_joined(place.shape, rows)) for place in layout.segments]


def _segment(table: torch.Tensor, place: Segment) -> torch.Tensor:
    if table.numel() == 0:  # its strides are arbitrary, so it cannot be viewed as wider elements
        return table.to(place.dtype)
    return table[:, place.start : place.stop].view(place.dtype)


def _joined(shape: torch.Size, rows: int) -> tuple[int, ...]:
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


def _aligned(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    # A backend may return a slice of something larger, which may start anywhere.
    return buffer.clone() if buffer.storage_offset() % layout.alignment else buffer
