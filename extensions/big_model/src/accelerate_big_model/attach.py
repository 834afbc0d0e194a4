"""Attach hooks to the modules of a model, according to where each module runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from accelerate_big_model.hooks import AlignDevicesHook, LayerwiseCastingHook, add_hook_to_module
from accelerate_big_model.offload import PrefixedDataset
from accelerate_big_model.tensors import Device, TiedMap, hook_of, joined, named_module_tensors


def _walk(
    name: str, module: nn.Module, preload_module_classes: Sequence[str] | None
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield every module with its full name, and whether its submodules are handled together with it."""
    # Attention reads the weights of its output layer without calling the layer.
    whole = isinstance(module, nn.MultiheadAttention) or (
        type(module).__name__ in (preload_module_classes or ())
    )
    yield name, module, whole
    for child_name, child in () if whole else module.named_children():
        yield from _walk(joined(name, child_name), child, preload_module_classes)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Make every submodule that has its own tensors run on a device and move its inputs there.

    Modules that already have a hook keep it.

    Args:
        execution_device: the device to which inputs are moved.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes whose submodules get no hook.
        tied_params_map: shared weights that are already on a device, see `AlignDevicesHook`.
    """
    for _, part, _ in _walk("", module, preload_module_classes):
        if hook_of(part) is None and any(True for _ in named_module_tensors(part)):
            hook = AlignDevicesHook(
                execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map
            )
            add_hook_to_module(part, hook)


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
    """Attach a hook to every submodule that has its own tensors; each hook handles only these.

    Args:
        module_name: the full name of `module`, which is the prefix of its names in `weights_map`.
        preload_module_classes: names of classes that use the weights of their submodules without
            calling them; a single hook handles all tensors of such a module.
        execution_device, offload, weights_map, offload_buffers, skip_keys, tied_params_map:
            see `AlignDevicesHook`.
    """
    for name, part, whole in _walk(module_name, module, preload_module_classes):
        if any(True for _ in named_module_tensors(part, recurse=whole)):
            own = weights_map
            if weights_map is not None and name:
                own = PrefixedDataset(weights_map, f"{name}.")
            hook = AlignDevicesHook(
                execution_device,
                offload,
                weights_map=own,
                offload_buffers=offload_buffers,
                place_submodules=whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(part, hook, append=True)


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
    """Attach hooks to the blocks of a model, with a device and offloading for each block.

    The output of the model is moved to the device of its input.

    Args:
        execution_device, offload: one value for the whole model, or a mapping from the full names
            of blocks to their values.
        module_name: the full name of `module`, which is the prefix of its names in `weights_map`.
        weights_map, offload_buffers, skip_keys, tied_params_map: see `AlignDevicesHook`.
        preload_module_classes: see `attach_align_device_hook`.
    """
    blocks = offload if isinstance(offload, Mapping) else [""]
    devices: Mapping[str, Any] = (
        execution_device
        if isinstance(execution_device, Mapping)
        else dict.fromkeys(blocks, execution_device)
    )
    flags = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    if hook_of(module) is None:
        # The first of the module's hooks, so that it sees the device of the input.
        outer = AlignDevicesHook(io_same_device=True, skip_keys=skip_keys)
        add_hook_to_module(module, outer)
    queue = [(module_name, module)]
    while queue:
        name, block = queue.pop()
        if name not in devices:
            queue += [(joined(name, n), child) for n, child in block.named_children()]
            continue
        if flags.get(name, False):
            attach_align_device_hook(
                block,
                devices[name],
                True,
                weights_map,
                offload_buffers,
                name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
        else:
            hook = AlignDevicesHook(
                devices[name],
                place_submodules=True,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(block, hook, append=True)
        if devices[name] is not None:
            # Inner modules may be called without the block: a ModuleList itself never runs.
            attach_execution_device_hook(
                block, devices[name], skip_keys, preload_module_classes, tied_params_map
            )


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear layers and convolutions in one dtype and compute in another.

    This is for inference, for example with `torch.float8_e4m3fn` weights and bfloat16 arithmetic.

    Args:
        module: the model.
        storage_dtype: the dtype of the weights between forwards.
        compute_dtype: the dtype of the weights during a layer's forward; inputs must have it.
        skip_modules_pattern: regular expressions that are searched in full names. Modules that match
            are skipped with all of their submodules. Norms should be skipped.
        skip_modules_classes: classes that are skipped with all of their submodules.
        non_blocking: don't wait for the casts.

    Example:
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 2)}).bfloat16()
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, "head")
        y = model["head"](model["body"](x.bfloat16()))
    """
    patterns = (
        (skip_modules_pattern,)
        if isinstance(skip_modules_pattern, str)
        else tuple(skip_modules_pattern or ())
    )
    queue = [("", module)]
    while queue:
        name, current = queue.pop()
        if isinstance(current, skip_modules_classes or ()):
            continue
        if any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(current, (nn.Linear, _ConvNd)):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(current, hook, append=True)
            continue
        queue += [(joined(name, n), child) for n, child in current.named_children()]
