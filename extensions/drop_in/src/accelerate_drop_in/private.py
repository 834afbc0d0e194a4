"""Members of the original that clients use, private ones above all, added to the core's classes."""

from __future__ import annotations

import os
from operator import attrgetter
from typing import Any

from accelerate_core import (
    Accelerator,
    AcceleratorState,
    GradientState,
    ParallelismConfig,
    PartialState,
)
from accelerate_core.data.loader import CoreLoader
from accelerate_core.delegation import attribute
from accelerate_core.distributed import process
from accelerate_core.training.optimizer import AcceleratedOptimizer

#: Runtimes that were reset: what they started is ended when Python exits.
_left: list[process.Runtime] = []


class _Shared:
    """`_shared_state`: what all instances of a state have, empty before the first one is made."""

    def __init__(self, needs_accelerator: bool) -> None:
        self.needs_accelerator = needs_accelerator

    def __get__(self, one: Any, owner: Any) -> dict[str, Any]:
        runtime = process.running()
        if runtime is None or (self.needs_accelerator and process.current_user() is None):
            return {}
        return dict(vars(runtime))


def _reset_all(cls: Any) -> None:
    """Forget the processes; the next state or Accelerator finds them again, and its own device."""
    if (runtime := process.running()) is not None:
        _left.append(runtime)
    process._end_globals()
    process._current = None


def _reset_accelerators(cls: Any, reset_partial_state: bool = False) -> None:
    """Forget the Accelerators, and with `reset_partial_state` the processes."""
    if (runtime := process.running()) is not None:
        runtime.users.clear()
        runtime.unended = 0
    if reset_partial_state:
        _reset_all(cls)


def _keep(cls: Any) -> None:
    """Do nothing: each Accelerator has a gradient state of its own."""


def _set_sync_gradients(self: GradientState, sync_gradients: bool) -> None:
    """Say whether gradients are synchronised from now on."""
    self.sync_gradients = sync_gradients


def _set_overflow(self: AcceleratedOptimizer, skipped: bool) -> None:
    self._was_skipped = skipped


def _mesh(self: ParallelismConfig) -> Any:
    """Return the mesh of the Accelerator that runs with this config, None if there is none."""
    user = process.current_user()
    return user.torch_device_mesh if user and user.parallelism_config is self else None


def _get_device_mesh(self: ParallelismConfig, device_type: str | None = None) -> Any:
    """Return the mesh that is there, else one that is made for a type of device."""
    found = _mesh(self)
    return self.build_device_mesh(device_type) if found is None and device_type else found


def _fsdp_dim_names(self: ParallelismConfig) -> list[str]:
    """Return the dimensions over which FSDP shards and copies."""
    return [*(["dp_replicate"] if self.size("dp_replicate") > 1 else []), "dp_shard_cp"]


def _get_sampler(self: CoreLoader) -> Any:
    """Return what decides the order."""
    from accelerate_core.data.order import order_sampler

    return order_sampler(self)


def _is_stateful(self: CoreLoader) -> bool:
    return hasattr(type(self.base), "load_state_dict")


def add() -> None:
    """Add them."""
    lists = {f"_{one}": attribute(f"_prepared.{one}", "") for one in ("models", "optimizers")}
    lists["_schedulers"] = attribute("_prepared.schedulers", "")
    lists["_dataloaders"] = attribute("_prepared.loaders", "")
    lists["_custom_objects"] = attribute("_saving.registered", "")
    added: dict[Any, dict[str, Any]] = {
        Accelerator: lists,
        AcceleratedOptimizer: {
            "_is_overflow": property(attrgetter("_was_skipped"), _set_overflow),
        },
        PartialState: {"_reset_state": classmethod(_reset_all)},
        AcceleratorState: {
            "_reset_state": classmethod(_reset_accelerators),
            "parallelism_config": attribute("_accelerator.parallelism_config", ""),
            "fork_launched": property(lambda self: "FORK_LAUNCHED" in os.environ),
        },
        GradientState: {
            "_reset_state": classmethod(_keep),
            "_set_sync_gradients": _set_sync_gradients,
            "initialized": property(lambda self: True),
            "is_xla_gradients_synced": False,
        },
        ParallelismConfig: {
            "device_mesh": property(_mesh),
            "get_device_mesh": _get_device_mesh,
            "fsdp_dim_names": property(_fsdp_dim_names),
        },
        CoreLoader: {
            "base_dataloader": attribute("base", ""),
            "get_sampler": _get_sampler,
            "use_stateful_dataloader": property(_is_stateful),
        },
    }
    for cls, members in added.items():
        if "_reset_state" in members:
            members["_shared_state"] = _Shared(cls is not PartialState)
        for name, member in members.items():
            setattr(cls, name, member)


add()
