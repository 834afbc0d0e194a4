"""Create models whose weights need no memory, or are created directly on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accelerate_big_model.tensors import Device, rebuilt
from accelerate_checkpoint import as_device
from accelerate_core.plugin import env_flag


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create models on the meta device, with shapes and dtypes but without data.

    Each parameter has data until it is registered in its module, so the largest one must fit into
    memory.

    Args:
        include_buffers: also create buffers without data. The default is
            `ACCELERATE_INIT_INCLUDE_BUFFERS`, or False, because few checkpoints contain the values
            from which buffers are computed.

    Example:
        with init_empty_weights():
            model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(50)))
        assert model[0].weight.device.type == "meta"
    """
    with init_on_device("meta", include_buffers):
        yield


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create models with their parameters on a device. Each parameter is moved when it is registered.

    Args:
        device: the device of the parameters.
        include_buffers: create every tensor on the device; see `init_empty_weights`.
    """
    target = as_device(device)
    if include_buffers is None:
        include_buffers = env_flag(os.environ, "ACCELERATE_INIT_INCLUDE_BUFFERS")
    if include_buffers:
        with target:
            yield
        return

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        # A parameter that is already on the device isn't replaced, so it stays tied.
        if not isinstance(parameter, nn.Parameter) or parameter.device == target:
            return None
        return rebuilt(parameter, parameter.detach().to(target))

    handle = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        handle.remove()
