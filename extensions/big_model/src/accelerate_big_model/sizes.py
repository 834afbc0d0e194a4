"""How large modules are, and how much memory there is for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate_big_model.tensors import joined, named_module_tensors, torch_dtype
from accelerate_checkpoint.weights import convert_file_size_to_int
from accelerate_core.errors import ConfigurationError, did_you_mean

#: Index of an accelerator, `"mps"`, `"cpu"` or `"disk"`.
DeviceName: TypeAlias = int | str

_SUB_BYTE = {"fp8": 1.0, "int4": 0.5, "int2": 0.25}


def dtype_byte_size(dtype: Any) -> float:
    """Return the bytes of one element; below 1 for bool and the planned 4 and 2 bit formats."""
    custom = str(getattr(dtype, "value", dtype))
    if custom in _SUB_BYTE:
        return _SUB_BYTE[custom]
    dtype = torch_dtype(dtype)
    return 1 / 8 if dtype == torch.bool else float(dtype.itemsize)


def _bytes_of(
    name: str, tensor: torch.Tensor, dtype: Any, special_dtypes: Mapping[str, Any]
) -> float:
    own = dtype_byte_size(tensor.dtype)
    if name in special_dtypes:
        own = dtype_byte_size(special_dtypes[name])
    elif dtype is not None and tensor.dtype.is_floating_point:
        own = min(own, dtype_byte_size(dtype))
    return tensor.numel() * own


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by full name; `""` is the whole.

    A tensor that several names share counts once within each module that holds it.

    Args:
        model: any module, also on the meta device.
        dtype: count floating point tensors as if cast to this (never larger than they are).
        special_dtypes: the dtype of single tensors, by full name.
        buffers_only: leave parameters out.
    """
    sizes: dict[str, float] = defaultdict(float)
    counted: dict[str, set[int]] = defaultdict(set)
    for name, tensor in named_module_tensors(model, recurse=True, remove_duplicate=False):
        if buffers_only and isinstance(tensor, nn.Parameter):
            continue
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            prefix = ".".join(parts[:depth])
            if id(tensor) not in counted[prefix]:
                counted[prefix].add(id(tensor))
                sizes[prefix] += _bytes_of(name, tensor, dtype, special_dtypes or {})
    return defaultdict(int, {name: math.ceil(size) for name, size in sizes.items()})


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
) -> int:
    """Return the bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str],
) -> tuple[int, list[str]]:
    """Return the size and names of the largest layers: the pieces that must stay whole.

    A piece is a lone tensor, a module without children, or one whose class is listed.
    """
    largest, names = 0, list[str]()
    queue = list(modules)
    while queue:
        name, module = queue.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            own = module.named_parameters(recurse=False)
            queue = [(joined(name, n), part) for n, part in [*own, *children]] + queue
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest and size:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and size and names of its largest layers."""
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    pieces = [*model.named_children(), *model.named_parameters(recurse=False)]
    return sizes[""], get_max_layer_size(pieces, sizes, list(no_split))


def _free_on_accelerator(index: int) -> int:
    for owner, name in (
        (torch.accelerator, "get_memory_info"),
        (torch.get_device_module(), "mem_get_info"),
    ):
        query = getattr(owner, name, None)
        if query is not None:
            try:
                return int(query(index)[0])
            except (RuntimeError, NotImplementedError):
                continue
    return _free_on_host()


def _free_on_host() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _measure_memory() -> dict[DeviceName, int]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "mps":
        # It shares the host's memory, and has no index.
        return {"mps": _free_on_host()}
    count = 0 if device is None else torch.accelerator.device_count()
    return {
        **{index: _free_on_accelerator(index) for index in range(count)},
        "cpu": _free_on_host(),
    }


def get_max_memory(
    max_memory: Mapping[DeviceName, int | str] | None = None,
) -> dict[DeviceName, int]:
    """Return the bytes each device may take, accelerators first, then `mps`, `cpu`, `disk`.

    Without an argument the free memory is measured. Sizes given as text (`"10GiB"`) are
    converted.

    Raises:
        ConfigurationError: a key is no device.
    """
    if max_memory is None:
        return _measure_memory()
    order = ["mps", "cpu", "disk"]
    given: dict[DeviceName, int] = {}
    for key, size in max_memory.items():
        device = int(key.rpartition(":")[2]) if isinstance(key, str) and ":" in key else key
        if not isinstance(device, int) and device not in order:
            raise ConfigurationError(
                f"max_memory has the key {key!r}; allowed are the index of an accelerator,"
                f" 'mps', 'cpu' and 'disk'.{did_you_mean(str(key), order)}"
            )
        given[device] = convert_file_size_to_int(size)
    accelerators = sorted(key for key in given if isinstance(key, int))
    return {key: given[key] for key in [*accelerators, *order] if key in given}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceName, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Return a `max_memory` under which the accelerators get about the same share of a model.

    Each but the last is limited to its share and room for one more layer. Never more than
    given or measured.

    Args:
        model: any module, also on the meta device.
        max_memory: limits in bytes or as text, by device; measured where None.
        no_split_module_classes: names of classes that stay whole.
        dtype: count floating point tensors as if cast to this.
        special_dtypes: the dtype of single tensors.
        low_zero: leave as much of accelerator 0 free as the others allow.
    """
    memory = get_max_memory(max_memory)
    devices = [key for key, size in memory.items() if isinstance(key, int) and size > 0]
    if len(devices) < 2:
        return memory
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    keep = as_list(no_split_module_classes)
    layer, _ = get_max_layer_size([*model.named_children()], sizes, keep)
    sharing = devices[1:] if low_zero else devices
    limit = math.ceil(sizes[""] / len(sharing)) + layer
    for device in sharing[:-1]:
        memory[device] = min(memory[device], limit)
    if low_zero:
        others = sum(memory[device] for device in sharing)
        memory[devices[0]] = min(memory[devices[0]], max(0, sizes[""] - others))
    return memory


def as_list(value: Sequence[str] | str | None) -> list[str]:
    """Return one name or several or none as a list."""
    return [value] if isinstance(value, str) else list(value or ())
