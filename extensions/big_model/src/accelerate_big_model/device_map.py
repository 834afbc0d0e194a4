"""Deciding which part of a model lives where, from sizes alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate_big_model.sizes import (
    DeviceName,
    as_list,
    compute_module_sizes,
    get_max_layer_size,
    get_max_memory,
)
from accelerate_big_model.tensors import (
    find_tied_parameters,
    joined,
    named_module_tensors,
    within,
)

Item = tuple[str, Any]


@dataclass
class _Plan:
    """One attempt to fill the devices in order."""

    sizes: Mapping[str, int]
    no_split: list[str]
    tied: list[list[str]]
    room: dict[DeviceName, float]
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
        return self.extra(name, device) <= self.room[device]

    def device_of_twin(self, name: str) -> DeviceName | None:
        """Return the device of something tied to a piece, if the piece fits there too."""
        for group in self.tied:
            if any(within(tied, name) for tied in group):
                for device in self.room:
                    shared = any(self._is_on(tied, device) for tied in group)
                    if shared and self.fits(name, device):
                        return device
        return None

    def put(self, name: str, device: DeviceName) -> None:
        size = self.extra(name, device)
        self.room[device] -= size
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
    devices, queue = list(plan.room), _pieces("", model)
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
    max_memory: Mapping[DeviceName, int | str] | None = None,
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
    room is left on the device that computes for the largest layer that comes back to it.
    Tied weights stay together where they fit.

    Args:
        model: any module, also on the meta device.
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
    room: dict[DeviceName, float] = {**get_max_memory(max_memory)}
    room.setdefault("disk", math.inf)
    main = next(iter(room))
    layer, _ = get_max_layer_size(_pieces("", model), sizes, no_split)
    kept_free: set[DeviceName] = set()
    while True:
        limits = {d: size - (layer if d in kept_free else 0) for d, size in room.items()}
        plan = _Plan(sizes, no_split, find_tied_parameters(model), limits)
        _fill(plan, model, fallback_allocation)
        used = set(plan.placed.values())
        needed = {main} if used & ({"cpu", "disk"} - {main}) else set()
        if "disk" in used and "cpu" in room:
            needed.add("cpu")
        needed.discard("disk")
        if needed <= kept_free:
            break
        kept_free |= needed
    if verbose:
        print("\n".join(plan.log))
    if not offload_buffers:
        _warn_of_buffers(model, plan, main, layer)
    return clean_device_map(dict(plan.placed)) if clean_result else dict(plan.placed)


def _warn_of_buffers(model: nn.Module, plan: _Plan, main: DeviceName, layer: int) -> None:
    sizes = compute_module_sizes(model, buffers_only=True)
    away = {"cpu", "disk"} - {main}
    staying = sum(sizes.get(name, 0) for name, place in plan.placed.items() if place in away)
    if staying > plan.room[main] + layer:
        warnings.warn(
            f"The buffers of the offloaded modules take {staying} bytes of {main!r}, more than is"
            " left there. Pass offload_buffers=True to offload them too.",
            stacklevel=3,
        )


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
