"""Giving every module of a model the hook that its place asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_big_model.hooks import AlignDevicesHook, add_hook_to_module
from accelerate_big_model.offload import PrefixedDataset
from accelerate_big_model.tensors import Device, TiedMap, named_module_tensors

__all__ = [
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
]


def _taken_whole(module: nn.Module, preload_module_classes: Sequence[str] | None) -> bool:
    # Attention reads the weights of its output layer without calling that layer.
    return isinstance(module, nn.MultiheadAttention) or (
        type(module).__name__ in (preload_module_classes or ())
    )


def _child_name(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Have every submodule with weights of its own run on a device, inputs moved there.

    Modules that have a hook keep it. For the arguments see `AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and any(True for _ in named_module_tensors(module)):
        hook = AlignDevicesHook(
            execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(module, hook)
    if _taken_whole(module, preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(
            child, execution_device, skip_keys, preload_module_classes, tied_params_map
        )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Hook every submodule that has tensors of its own; each handles just these.

    Args:
        module: the module.
        module_name: its full name, the prefix of its names in `weights_map`.
        preload_module_classes: names of classes whose tensors are handled at once, because
            they use the weights of their submodules without calling them.
        execution_device, offload, weights_map, offload_buffers, skip_keys, tied_params_map:
            see `AlignDevicesHook`.
    """
    whole = _taken_whole(module, preload_module_classes)
    if any(True for _ in named_module_tensors(module, recurse=whole)):
        own_map = weights_map
        if weights_map is not None and module_name:
            own_map = PrefixedDataset(weights_map, f"{module_name}.")
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=own_map,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            _child_name(module_name, name),
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Hook the blocks of a model, each as the two mappings say for its full name.

    A single device, or a single yes or no, holds for the whole model. The output of the
    model comes to the device of its input. For the other arguments see
    `attach_align_device_hook`.
    """
    if not isinstance(execution_device, Mapping):
        names = list(offload) if isinstance(offload, Mapping) else [""]
        devices: dict[str, Any] = dict.fromkeys(names, execution_device)
    else:
        devices = dict(execution_device)
    flags = dict(offload) if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    shared: dict[str, Any] = {
        "skip_keys": skip_keys,
        "preload_module_classes": preload_module_classes,
        "tied_params_map": tied_params_map,
    }
    if not hasattr(module, "_hf_hook"):
        # The first of the module's hooks, so that it sees where the input comes from.
        outer = AlignDevicesHook(io_same_device=True, skip_keys=skip_keys)
        add_hook_to_module(module, outer)
    queue = [(module_name, module)]
    while queue:
        name, block = queue.pop()
        if name in devices:
            offloaded = flags.get(name, False)
            maps = (weights_map, offload_buffers) if offloaded else (None, False)
            _hook_block(block, name, devices[name], offloaded, *maps, shared)
        else:
            queue += [(_child_name(name, n), child) for n, child in block.named_children()]


def _hook_block(
    block: nn.Module,
    name: str,
    device: Device | None,
    offload: bool,
    weights_map: Mapping[str, torch.Tensor] | None,
    offload_buffers: bool,
    shared: Mapping[str, Any],
) -> None:
    if offload:
        attach_align_device_hook(
            block,
            device,
            offload=True,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=name,
            **shared,
        )
    else:
        hook = AlignDevicesHook(
            device,
            place_submodules=True,
            skip_keys=shared["skip_keys"],
            tied_params_map=shared["tied_params_map"],
        )
        add_hook_to_module(block, hook, append=True)
    if device is not None:
        # Inner modules may be called past the block: a ModuleList never runs itself.
        attach_execution_device_hook(block, device, **shared)
