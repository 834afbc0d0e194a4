"""Copy batches to an accelerator on a side stream, one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from accelerate_core.distributed.tree import children, flatten, map_tensors, rebuild, send_to_device

T = TypeVar("T")


def feed(
    batches: Iterator[Any], device: torch.device, non_blocking: bool = False, streams: Any = None
) -> Iterator[Any]:
    """Yield the batches on the device.

    If the device has streams, each batch is pinned and copied on a side stream while the caller
    works on the previous one. The caller's stream waits for the copy, the host does not. Otherwise
    a batch is moved when it is requested.

    Args:
        batches: trees of tensors, or objects with a `.to`.
        device: the target device.
        non_blocking: don't wait for the copy, on devices without streams.
        streams: the module with `Stream`, `Event`, `stream` and `current_stream`; by default
            torch's module for the device type. If its streams are `torch.Stream` objects, only `Stream`
            is used, because the other functions cost up to a hundred Python calls per batch.
    """
    if streams is None and device.type != "cpu":
        streams = getattr(torch, device.type, None)
    if streams is None or not hasattr(streams, "Stream"):
        for batch in batches:
            yield send_to_device(batch, device, non_blocking=non_blocking)
        return
    side = streams.Stream(device=device)
    copied = (_copy(batch, device, streams, side) for batch in batches)
    for (batch, tensors, arrived), _, _ in look_ahead(copied):
        if isinstance(side, torch.Stream):
            stream = torch.accelerator.current_stream(device.index)
        else:
            stream = streams.current_stream(device)
        stream.wait_event(arrived)
        for tensor in tensors:
            # The side stream owns the memory and must not reuse it while this stream works on it.
            tensor.record_stream(stream)
        yield batch


def look_ahead(items: Iterator[T]) -> Iterator[tuple[T, T | None, Exception | None]]:
    """Yield each item after reading the next one, together with the next item, or the reason for its absence.

    An exception is raised in the place of the item that it prevented, not before.
    """
    item = next(items, None)
    while item is not None:
        following = None
        failure = None
        try:
            following = next(items, None)
        except Exception as error:
            failure = error
        yield item, following, failure
        if failure is not None:
            raise failure
        item = following


def _copy(
    batch: Any, device: torch.device, streams: Any, side: Any
) -> tuple[Any, list[torch.Tensor], Any]:
    """Return the batch on the device, its tensors, and an event that follows the copies."""
    tensors: list[torch.Tensor] = []
    generic = isinstance(side, torch.Stream)
    with side if generic else streams.stream(side):
        moved = _move(batch, device, tensors)
        arrived = torch.Event(device) if generic else streams.Event()
        arrived.record(side)
    return moved, tensors, arrived


def _move(node: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    """Return the tree on the device, as `send_to_device` does, and add its tensors to `tensors`."""
    if isinstance(node, torch.Tensor):
        moved = _pinned(node).to(device, non_blocking=True)
        tensors.append(moved)
        return moved
    if callable(getattr(node, "to", None)):  # an object that moves itself
        moved = send_to_device(map_tensors(_pinned, node), device, non_blocking=True)
        tensors += [leaf for leaf in flatten(moved) if isinstance(leaf, torch.Tensor)]
        return moved
    inner = children(node)
    if inner is None:
        return node
    return rebuild(node, [_move(child, device, tensors) for child in inner])


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    can = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if can else tensor
