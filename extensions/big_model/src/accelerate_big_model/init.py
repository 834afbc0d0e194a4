"""Building models whose weights take no memory, or appear on a device at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accelerate_big_model.tensors import Device, rebuilt
from accelerate_checkpoint.weights import as_device
from accelerate_core.booleans import env_flag


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build models on the meta device: shapes and dtypes, no data.

    A parameter has data for the moment between its making and its registration, so the largest
    one has to fit into memory.

    Args:
        include_buffers: buffers too. By default `ACCELERATE_INIT_INCLUDE_BUFFERS` says, else
            they keep their data, for few checkpoints hold what a buffer was computed from.

    Example:
        with init_empty_weights():
            model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(50)))
        assert model[0].weight.device.type == "meta"
    """
    with init_on_device("meta", include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Build models with their parameters on a device, each moved when it is registered.

    Args:
        device: where to.
        include_buffers: create every tensor there; see `init_empty_weights`.
    """
    target = as_device(device)
    if include_buffers is None:
        include_buffers = env_flag(os.environ, "ACCELERATE_INIT_INCLUDE_BUFFERS")
    if include_buffers:
        with target:
            yield
        return

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        # One that is there already is kept as it is, and so stays tied.
        if not isinstance(parameter, nn.Parameter) or parameter.device == target:
            return None
        return rebuilt(parameter, parameter.detach().to(target))

    handle = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        handle.remove()
