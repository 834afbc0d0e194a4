"""Batches on their way to an accelerator: copied on a stream of their own, one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from accelerate_core.distributed.tree import flatten, map_tensors, send_to_device

T = TypeVar("T")


def feed(
    batches: Iterator[Any], device: torch.device, non_blocking: bool = False, streams: Any = None
) -> Iterator[Any]:
    """Yield the batches on the device.

    Where the device has streams, a batch is put in pinned memory and copied on a side stream while
    the batch before is worked on; the caller's stream waits for the copy, the host does not. Else,
    and on the CPU, each is moved when its turn comes.

    Args:
        batches: trees of tensors, or objects with a `.to`.
        device: where they go.
        non_blocking: for devices without streams: do not wait for the copy.
        streams: the module with `Stream`, `Event`, `stream` and `current_stream`; that of the
            device's type (`torch.cuda`, ...) by default.
    """
    if streams is None and device.type != "cpu":
        streams = getattr(torch, device.type, None)
    if streams is None or not hasattr(streams, "Stream"):
        for batch in batches:
            yield send_to_device(batch, device, non_blocking=non_blocking)
        return
    side = streams.Stream(device=device)
    moved = (_copy(batch, device, streams, side) for batch in batches)
    for (batch, arrived), _, _ in look_ahead(moved):
        stream = streams.current_stream(device)
        stream.wait_event(arrived)
        for leaf in flatten(batch):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
                # Its memory belongs to the side stream: not to be reused while this one works.
                leaf.record_stream(stream)
        yield batch


def look_ahead(items: Iterator[T]) -> Iterator[tuple[T, T | None, Exception | None]]:
    """Yield each item after the next one was read, together with that one or the reason why there is none.

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


def _copy(batch: Any, device: torch.device, streams: Any, side: Any) -> tuple[Any, Any]:
    with streams.stream(side):
        moved = send_to_device(map_tensors(_pinned, batch), device, non_blocking=True)
        arrived = streams.Event()
        arrived.record(side)
    return moved, arrived


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    can = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if can else tensor
