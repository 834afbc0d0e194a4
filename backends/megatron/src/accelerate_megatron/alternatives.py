"""Backends to use on a machine without a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_core.plugin import (
    ParallelismConfig,
    PluginError,
    disabled_names,
    installed,
    listing,
    pip_command,
)
from accelerate_megatron.settings import Sizes

#: Accepts all that megatron does, except pipelines and experts on several ranks.
_USUAL = "fsdp2"


def alternative(config: ParallelismConfig | None, sizes: Sizes, device: str) -> str:
    """Return which backend accepts the whole request on this type of device, or that none does."""
    dimensions = [] if config is None else config.active_mesh_dims
    asked = [f"{name}_size={config.size(name)}" for name in dimensions] if config else []
    how = f" with ParallelismConfig({', '.join(asked)})" if asked else ""
    only_megatron = [one for one in asked if one.startswith("pp_")]
    if sizes.ep > 1:
        only_megatron.append(f"expert_model_parallel_size={sizes.ep}")
    elif names := _accepting(dimensions, device):
        return f"use backend={names[0]!r}{how}"
    if only_megatron:
        return f"leave out {listing(only_megatron)}, because no other installed backend supports it"
    if _USUAL in disabled_names():
        return f"use backend={_USUAL!r}{how}, which ACCELERATE_DISABLED_PLUGINS disables"
    return f"install {_USUAL}: {pip_command(_USUAL)}"


def _accepting(dimensions: Sequence[str], device: str) -> list[str]:
    """Return the usual backend, or else those that have pipelines, if they accept these dimensions."""
    found = []
    for record in installed().of_kind("backend"):
        if record.name == "megatron" or record.name in disabled_names():
            continue
        try:
            supports = record.load_checked().supports
        except PluginError:
            continue
        mesh, devices = supports.get("mesh") or (), supports.get("devices")
        fits = set(dimensions) <= set(mesh) and (devices is None or device in devices)
        if fits and (record.name == _USUAL or "pp" in dimensions):
            found.append(record.name)
    return found
