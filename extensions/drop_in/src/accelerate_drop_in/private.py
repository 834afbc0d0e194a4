"""Add members of Accelerate's classes that libraries use, mostly private ones, to the core's classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
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
from accelerate_core.distributed import process
from accelerate_core.plugin import AcceleratedOptimizer, ConfigurationError, did_you_mean, listing
from accelerate_drop_in.assignment import assign_to_state, kept, set_xla_synced
from accelerate_drop_in.listed_models import ListedModels

#: Runtimes that were reset. Keeping them alive delays their cleanup until Python exits.
_left: list[process.Runtime] = []


class _Shared:
    """`_shared_state`, the attributes that all instances of a state share; empty before the first one."""

    def __init__(self, needs_accelerator: bool) -> None:
        self.needs_accelerator = needs_accelerator

    def __get__(self, one: Any, owner: Any) -> dict[str, Any]:
        runtime = process.running()
        if runtime is None or (self.needs_accelerator and process.current_user() is None):
            return {}
        return dict(vars(runtime))


def _reset_all(cls: Any) -> None:
    """Discard the runtime. The next state or Accelerator creates a new one."""
    if (runtime := process.running()) is not None:
        _left.append(runtime)
    process._end_globals()
    process._current = None


def _reset_accelerators(cls: Any, reset_partial_state: bool = False) -> None:
    """Discard the Accelerators, and with `reset_partial_state` also the runtime."""
    if (runtime := process.running()) is not None:
        runtime.users.clear()
        runtime.unended = 0
    if reset_partial_state:
        _reset_all(cls)


def _keep(cls: Any) -> None:
    """Do nothing, because each Accelerator has its own gradient state."""


def _set_sync_gradients(self: GradientState, sync_gradients: bool) -> None:
    """Set whether gradients are synchronised from now on."""
    self.sync_gradients = sync_gradients


def _set_overflow(self: AcceleratedOptimizer, skipped: bool) -> None:
    self._was_skipped = skipped


class _AccumulationSettings(MutableMapping[str, Any]):
    """`plugin_kwargs`, the accumulation settings by name. Changes take effect."""

    _names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")

    def __init__(self, state: GradientState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return getattr(self._state, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise ConfigurationError(
                f"plugin_kwargs has no key {name!r}. Its keys are {listing(self._names)}."
                f"{did_you_mean(name, self._names)}"
            )
        if name == "num_steps" and not (isinstance(value, int) and value >= 1):
            raise ConfigurationError(f"num_steps={value!r} must be a whole number above 0.")
        setattr(self._state, name, value)

    def __delitem__(self, name: str) -> None:
        raise ConfigurationError(
            f"plugin_kwargs[{name!r}] cannot be deleted. Assign another value to it."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


def _set_plugin_kwargs(self: GradientState, settings: Mapping[str, Any]) -> None:
    _AccumulationSettings(self).update(settings)


def _kept_on_accelerator_state(self: AcceleratorState, name: str) -> Any:
    """Return an attribute that a script assigned to the states, or else one of an active plugin."""
    found = kept()
    return found[name] if name in found else _served_on_state(self, name)


def _kept_on_state(self: PartialState, name: str) -> Any:
    """Return an attribute that a script assigned to the states."""
    found = kept()
    if name in found:
        return found[name]
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# `__getattr__` is hidden from type checkers, so that they find misspelt names.
_served_on_state: Any = vars(AcceleratorState)["__getattr__"]


def _mesh(self: ParallelismConfig) -> Any:
    """Return the mesh of the Accelerator that runs with this config, None if there is none."""
    user = process.current_user()
    return user.torch_device_mesh if user and user.parallelism_config is self else None


def _get_device_mesh(self: ParallelismConfig, device_type: str | None = None) -> Any:
    """Return the existing mesh, or else create one for a device type."""
    found = _mesh(self)
    return self.build_device_mesh(device_type) if found is None and device_type else found


def _fsdp_dim_names(self: ParallelismConfig) -> list[str]:
    """Return the dimensions over which FSDP shards and replicates."""
    return [*(["dp_replicate"] if self.size("dp_replicate") > 1 else []), "dp_shard_cp"]


def _get_sampler(self: CoreLoader) -> Any:
    """Return the sampler that decides the order."""
    from accelerate_core.data.order import order_sampler

    return order_sampler(self)


def _is_stateful(self: CoreLoader) -> bool:
    return hasattr(type(self.base), "load_state_dict")


def _prepare_backend(
    self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
) -> tuple[str | None, Any]:
    """Return the backend of the process group, and the type of the run."""
    return backend or self.backend, self.distributed_type


#: The attributes that Accelerate's state has in a pickle.
_PICKLED = (
    *("backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    *("local_process_index", "fork_launched"),
)


def _pickled_state(self: PartialState) -> dict[str, Any]:
    """Return the attributes of Accelerate's state, with `_cpu`."""
    if type(self) is not PartialState:
        return vars(self)
    found = {name: getattr(self, name, None) for name in _PICKLED}
    return {**found, "_cpu": self.device.type == "cpu", "fork_launched": False}


class _StoredState(PartialState):
    """A state from a pickle, in a process that has no state. Its values are those in the pickle."""

    def __reduce__(self) -> Any:
        make: Any = object.__new__
        return make, (PartialState,), vars(self)["_stored"]


def _stored(name: str) -> Any:
    return property(lambda self: vars(self)["_stored"].get(name))


for _name in _PICKLED:
    setattr(_StoredState, _name, _stored(_name))


def _restore_state(self: Any, state: dict[str, Any]) -> None:
    """Restore an unpickled state: the state of this process, or the stored one if there is none."""
    if type(self) is not PartialState:
        vars(self).update(state)
    elif process.running() is None:
        vars(self)["_stored"] = state
        object.__setattr__(self, "__class__", _StoredState)


def _at(path: str) -> Any:
    """Return a property that reads `path` of an object."""
    return property(attrgetter(path))


def add() -> None:
    """Add the members to the classes."""
    lists = {"_models": property(ListedModels)}
    lists["_optimizers"] = _at("_prepared.objects.optimizers")
    lists["_schedulers"] = _at("_prepared.objects.schedulers")
    lists["_dataloaders"] = _at("_prepared.objects.loaders")
    lists["_custom_objects"] = _at("_saving.registered")
    lists["_save_model_state_pre_hook"] = _at("_saving.save_hooks")
    lists["_load_model_state_pre_hook"] = _at("_saving.load_hooks")
    added: dict[Any, dict[str, Any]] = {
        Accelerator: lists,
        AcceleratedOptimizer: {
            "_is_overflow": property(attrgetter("_was_skipped"), _set_overflow),
        },
        PartialState: {
            "_reset_state": classmethod(_reset_all),
            "_prepare_backend": _prepare_backend,
            "__getstate__": _pickled_state,
            "__setstate__": _restore_state,
            "__setattr__": assign_to_state,
            "__getattr__": _kept_on_state,
        },
        AcceleratorState: {
            "__getattr__": _kept_on_accelerator_state,
            "_reset_state": classmethod(_reset_accelerators),
            "parallelism_config": _at("_accelerator.parallelism_config"),
            "fork_launched": property(lambda self: "FORK_LAUNCHED" in os.environ),
        },
        GradientState: {
            "_reset_state": classmethod(_keep),
            "_set_sync_gradients": _set_sync_gradients,
            "plugin_kwargs": property(_AccumulationSettings, _set_plugin_kwargs),
            "initialized": property(lambda self: True),
            "is_xla_gradients_synced": property(lambda self: False, set_xla_synced),
        },
        ParallelismConfig: {
            "device_mesh": property(_mesh),
            "get_device_mesh": _get_device_mesh,
            "fsdp_dim_names": property(_fsdp_dim_names),
        },
        CoreLoader: {
            "base_dataloader": _at("base"),
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
