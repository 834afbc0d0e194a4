"""Batches on their way to an accelerator: copied on a stream of their own, one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accelerate_core.distributed.tree import flatten, map_tensors, send_to_device


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
    ahead: tuple[Any, Any] | None = None
    failure: Exception | None = None
    while failure is None:
        following = None
        try:
            following = _copy(next(batches), device, streams, side)
        except StopIteration:
            break
        except Exception as error:  # after the batch before it, which is whole
            failure = error
        if ahead is not None:
            yield _handed_over(ahead, device, streams)
        ahead = following
    if ahead is not None:
        yield _handed_over(ahead, device, streams)
    if failure is not None:
        raise failure


def _copy(batch: Any, device: torch.device, streams: Any, side: Any) -> tuple[Any, Any]:
    with streams.stream(side):
        moved = send_to_device(map_tensors(_pinned, batch), device, non_blocking=True)
        arrived = streams.Event()
        arrived.record(side)
    return moved, arrived


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    can = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned()
    return tensor.pin_memory() if can else tensor


def _handed_over(ahead: tuple[Any, Any], device: torch.device, streams: Any) -> Any:
    moved, arrived = ahead
    stream = streams.current_stream(device)
    stream.wait_event(arrived)
    for leaf in flatten(moved):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type:
            # Its memory belongs to the side stream, which must not reuse it while this one works.
            leaf.record_stream(stream)
    return moved
