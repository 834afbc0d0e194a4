"""How large the parts of a model are, what memory there is, and which part lives where."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate_big_model.tensors import (
    find_tied_parameters,
    joined,
    named_module_tensors,
    torch_dtype,
    within,
)
from accelerate_checkpoint.weights import convert_file_size_to_int
from accelerate_core.errors import ConfigurationError, did_you_mean, warn

#: Index of an accelerator, `"mps"`, `"cpu"` or `"disk"`.
DeviceName: TypeAlias = int | str
Item = tuple[str, Any]

_SUB_BYTE = {"fp8": 1.0, "int4": 0.5, "int2": 0.25}


def dtype_byte_size(dtype: Any) -> float:
    """Return the bytes of one element; below 1 for bool and the planned 4 and 2 bit formats."""
    custom = str(getattr(dtype, "value", dtype))
    if custom in _SUB_BYTE:
        return _SUB_BYTE[custom]
    dtype = torch_dtype(dtype)
    return 1 / 8 if dtype == torch.bool else float(dtype.itemsize)


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by full name; `""` is the whole.

    A tensor that several names share counts once within each module that holds it.

    Args:
        dtype: count floating point tensors as if cast to this (never larger than they are).
        special_dtypes: the dtype of single tensors, by full name.
        buffers_only: leave parameters out.
    """
    special = special_dtypes or {}
    sizes: dict[str, float] = defaultdict(float)
    counted: set[tuple[str, int]] = set()
    for name, tensor in named_module_tensors(model, recurse=True, remove_duplicate=False):
        if buffers_only and isinstance(tensor, nn.Parameter):
            continue
        element = dtype_byte_size(special.get(name, tensor.dtype))
        if name not in special and dtype is not None and tensor.dtype.is_floating_point:
            element = min(element, dtype_byte_size(dtype))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            prefix = ".".join(parts[:depth])
            if (prefix, id(tensor)) not in counted:
                counted.add((prefix, id(tensor)))
                sizes[prefix] += tensor.numel() * element
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
    modules = (torch.accelerator, "get_memory_info"), (torch.get_device_module(), "mem_get_info")
    for module, name in modules:
        if hasattr(module, name):
            with suppress(RuntimeError, NotImplementedError):
                return int(getattr(module, name)(index)[0])
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
    max_memory: Mapping[DeviceName, float | str] | None = None,
) -> dict[DeviceName, int]:
    """Return the bytes each device may take, accelerators first, then `mps`, `cpu`, `disk`.

    Without an argument the free memory is measured. Sizes given as text (`"10GiB"`) or as a share of
    what was measured (1.5e9) are converted, in a dict of the caller's, too: callers go on with theirs.

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
        if isinstance(max_memory, dict):
            max_memory[key] = given[device]
    accelerators = sorted(key for key in given if isinstance(key, int))
    return {key: given[key] for key in [*accelerators, *order] if key in given}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Return a `max_memory` under which the accelerators get about the same share of a model.

    Each but the last is limited to its share and one more layer. Never more than
    given or measured. With `low_zero` as much of accelerator 0 is left free as the others allow.
    For the other arguments see `infer_auto_device_map`.
    """
    memory = get_max_memory(max_memory)
    devices = [key for key, size in memory.items() if isinstance(key, int) and size > 0]
    if len(devices) < 2:
        return memory
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    no_split = as_list(no_split_module_classes)
    layer, _ = get_max_layer_size([*model.named_children()], sizes, no_split)
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


# --- the map ----------------------------------------------------------------------------------


@dataclass
class _Plan:
    """One attempt to fill the devices in order."""

    sizes: Mapping[str, int]
    no_split: list[str]
    tied: list[list[str]]
    free: dict[DeviceName, float]
    placed: dict[str, DeviceName] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def extra(self, name: str, device: DeviceName) -> int:
        """Return the bytes a piece adds to a device that may hold what it is tied to."""
        size = self.sizes.get(name, 0)
        for group in self.tied:
            inside = [tied for tied in group if within(tied, name)]
            if inside and any(self._is_on(tied, device) for tied in group):
                size -= self.sizes.get(inside[0], 0)
        return size

    def _is_on(self, tensor: str, device: DeviceName) -> bool:
        return any(place == device and within(tensor, name) for name, place in self.placed.items())

    def fits(self, name: str, device: DeviceName) -> bool:
        return self.extra(name, device) <= self.free[device]

    def device_of_twin(self, name: str) -> DeviceName | None:
        """Return the device of something tied to a piece, if the piece fits there too."""
        for group in self.tied:
            if any(within(tied, name) for tied in group):
                for device in self.free:
                    shared = any(self._is_on(tied, device) for tied in group)
                    if shared and self.fits(name, device):
                        return device
        return None

    def put(self, name: str, device: DeviceName) -> None:
        size = self.extra(name, device)
        self.free[device] -= size
        self.placed[name] = device
        self.log.append(f"{name} ({size} bytes) goes to {device}.")

    def can_split(self, module: Any) -> bool:
        whole = not isinstance(module, nn.Module) or type(module).__name__ in self.no_split
        return not whole and any(True for _ in module.children())


def _pieces(name: str, module: nn.Module) -> list[Item]:
    parts = [*named_module_tensors(module), *module.named_children()]
    return [(joined(name, n), part) for n, part in parts]


def _take_first_fitting(plan: _Plan, queue: list[Item], device: DeviceName) -> list[Item] | None:
    """Place the first piece, largest pieces first, that fits; return the rest, None if none."""
    while True:
        for position, (name, _) in enumerate(queue):
            if plan.extra(name, device) > 0 and plan.fits(name, device):
                plan.put(name, device)
                return queue[:position] + queue[position + 1 :]
        if not any(plan.can_split(module) for _, module in queue):
            return None
        queue = [
            piece
            for name, module in queue
            for piece in (_pieces(name, module) if plan.can_split(module) else [(name, module)])
        ]


def _fill(plan: _Plan, model: nn.Module, fallback: bool) -> None:
    devices, queue = list(plan.free), _pieces("", model)
    while queue:
        name, module = queue.pop(0)
        device = devices[0]
        twin = plan.device_of_twin(name)
        if twin is not None:
            plan.put(name, twin)
        elif plan.fits(name, device):
            plan.put(name, device)
        elif plan.can_split(module):
            queue = _pieces(name, module) + queue
        else:
            queue.insert(0, (name, module))
            if fallback and device not in plan.placed.values() and device not in ("cpu", "disk"):
                queue = _take_first_fitting(plan, queue, device) or queue
            devices.pop(0)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, DeviceName]:
    """Spread a model over accelerators, then the CPU, then the disk, in the order of its parts.

    Only sizes of weights count, not those of activations. If something must be offloaded,
    memory is left free on the device that computes, for the largest layer that comes back to it.
    Tied weights stay together where they fit.

    Args:
        max_memory: limits in bytes or as text, by device; measured where None.
        no_split_module_classes: names of classes that stay whole on one device, as those
            with residual connections; by default the model's own `_no_split_modules`.
        dtype: count floating point tensors as if cast to this.
        special_dtypes: the dtype of single tensors.
        verbose: print each decision.
        clean_result: write one entry where all of a module is on one device.
        offload_buffers: buffers of offloaded modules are offloaded too.
        fallback_allocation: where nothing fits in order on an accelerator, look for a later
            part that does.

    Returns:
        Device by full module name; devices are indices of accelerators, `"cpu"`, `"disk"`.
    """
    if no_split_module_classes is None:
        no_split_module_classes = getattr(model, "_no_split_modules", None)
    no_split = as_list(no_split_module_classes)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    memory: dict[DeviceName, float] = {**get_max_memory(max_memory)}
    memory.setdefault("disk", math.inf)
    main = next(iter(memory))
    away = {"cpu", "disk"} - {main}
    layer, _ = get_max_layer_size(_pieces("", model), sizes, no_split)
    kept_free: set[DeviceName] = set()
    while True:
        limits = {d: size - (layer if d in kept_free else 0) for d, size in memory.items()}
        plan = _Plan(sizes, no_split, find_tied_parameters(model), limits)
        _fill(plan, model, fallback_allocation)
        used = set(plan.placed.values())
        needed = {main} if used & away else set()
        if "disk" in used and "cpu" in memory:
            needed.add("cpu")
        needed.discard("disk")
        if needed <= kept_free:
            break
        kept_free |= needed
    if verbose:
        print("\n".join(plan.log))
    buffers = compute_module_sizes(model, buffers_only=True)
    staying = sum(buffers.get(name, 0) for name, device in plan.placed.items() if device in away)
    if not offload_buffers and staying > plan.free[main] + layer:
        warn(
            f"The buffers of the offloaded modules take {staying} bytes of {main!r}, more than is"
            " left there. Pass offload_buffers=True to offload them too.",
        )
    return clean_device_map(plan.placed) if clean_result else plan.placed


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge the entries of every module that is on one device, in place; return the map."""
    prefix = joined(module_name, "")
    inside = [name for name in device_map if name.startswith(prefix) and name != module_name]
    devices = {device_map[name] for name in inside}
    if len(devices) == 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices.pop()
    else:
        for child in dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in inside):
            clean_device_map(device_map, prefix + child)
    return device_map
