"""What an Accelerator tells its loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate_core.config.handlers import DataLoaderConfiguration
from accelerate_core.distributed.communicator import Communicator
from accelerate_core.training.gradient_state import GradientState

Feed = Callable[[Iterator[Any]], Iterator[Any]]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a loader is shared out, and where its batches go.

    Args:
        config: how the data is shared out.
        num_processes, process_index: of how many ranks with different data this is which.
        device, put_on_device: where the batches go, and whether they are moved there at all.
        rng_types: generators whose state rank 0 shares at the start of every iteration: "torch",
            "generator" (the sampler's or dataset's own) or a device type; `["generator"]` if None.
        slice_fn_for_dispatch: `(data, tensor_slice, process_index=, num_processes=)` -> part.
        comm: how the ranks talk; None if they do not.
        order_comm: how all ranks agree on an order, where several read the same part and `comm`
            joins only those that read different ones; default `comm`.
        gradient_state: is told of iterations and batches.
        feed: iterator of batches -> iterator of batches on the device, for `put_on_device`.
        feed_always: call it where the batches are on the device already, too.
    """

    config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    num_processes: int = 1
    process_index: int = 0
    device: torch.device | None = None
    put_on_device: bool = False
    rng_types: Sequence[Any] | None = None
    slice_fn_for_dispatch: Callable[..., Any] | None = None
    comm: Communicator | None = None
    order_comm: Communicator | None = None
    gradient_state: GradientState | None = None
    feed: Feed | None = None
    feed_always: bool = False
