"""The deepspeed package: imported late, told of the device and of torch's process group."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.errors import ConfigurationError, MissingPluginError

__all__ = ["connect", "disconnect", "load", "rank_environment"]

_groups_at_first: dict[str, Any] = {}
_connected: list[Any] = []
_own_variables: list[str] = []


def load(device: torch.device) -> Any:
    """Import deepspeed for a kind of device and return it.

    The first import costs seconds, so it waits until an Accelerator needs it. Collectives over
    shared memory on the CPU are left out: they are compiled for minutes, and gloo does the same.

    Raises:
        MissingPluginError: it is not installed.
        ConfigurationError: it was imported before, for another kind of device.
    """
    if "deepspeed" not in sys.modules:
        try:
            importlib.metadata.version("deepspeed")
        except importlib.metadata.PackageNotFoundError:
            raise MissingPluginError(
                "The backend deepspeed needs the package deepspeed: "
                'pip install "accelerate-core[deepspeed]"'
            ) from None
    with _environment({"DS_ACCELERATOR": device.type}):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        found = get_accelerator()._name
    if found != device.type:
        raise ConfigurationError(
            f"deepspeed was set up for {found!r} (DS_ACCELERATOR, or an import before this "
            f"Accelerator), which runs on {device.type!r}. Make the Accelerator first, or set "
            f"DS_ACCELERATOR={device.type}."
        )
    # Asking for this name compiles test programs; what is set here is taken as it is.
    if "__compatible_ops__" not in vars(deepspeed.ops):
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside of the block where they are not set."""
    new = {name: text for name, text in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextmanager
def rank_environment(accelerator: Any) -> Iterator[None]:
    """Give deepspeed the variables of torchrun that it reads, where a run has none."""
    with _environment(
        {
            "RANK": str(accelerator.process_index),
            "LOCAL_RANK": str(accelerator.local_process_index),
            "WORLD_SIZE": str(accelerator.num_processes),
            "LOCAL_WORLD_SIZE": str(accelerator.local_process_count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    ):
        yield


def connect(accelerator: Any) -> Any:
    """Import deepspeed and let it talk over the process group that runs; return it."""
    deepspeed = load(accelerator.device)
    # Names DeepSpeed calls at each step, and nobody here can change.
    old = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    # Stage 3 reads it at each forward; torchrun and every launcher set it.
    if "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(accelerator.local_process_index)
        _own_variables.append("LOCAL_RANK")
    world = dist.group.WORLD
    if not _groups_at_first:
        _groups_at_first.update(
            {
                name: copy.copy(value)
                for name, value in vars(groups).items()
                if not name.startswith("__") and isinstance(value, dict | bool | int | None)
            }
        )
    sizes = accelerator.parallelism_config
    now = (world, sizes.tp_size, sizes.sp_size)
    if _connected and tuple(_connected) == now:
        return deepspeed
    if _connected:
        # An earlier Accelerator's groups have ended, or are not those of this one's sizes.
        comm.cdb = None
        for name, value in _groups_at_first.items():
            setattr(groups, name, copy.copy(value))
    with rank_environment(accelerator):
        deepspeed.init_distributed(
            dist_backend=dist.get_backend(),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=accelerator.group_timeout or dist.default_pg_timeout,
        )
    _connected[:] = now
    return deepspeed


def disconnect() -> None:
    """Take back what `connect` put into the environment."""
    while _own_variables:
        os.environ.pop(_own_variables.pop(), None)
