"""Measure the parts of a model and the available memory, and assign each part to a device."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
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
from accelerate_checkpoint import convert_file_size_to_int
from accelerate_core.plugin import ConfigurationError, did_you_mean, warn

#: Index of an accelerator, `"mps"`, `"cpu"` or `"disk"`.
DeviceName: TypeAlias = int | str
Item = tuple[str, Any]

logger = logging.getLogger(__name__)
_SUB_BYTE = {"fp8": 1.0, "int4": 0.5, "int2": 0.25}


def dtype_byte_size(dtype: Any) -> float:
    """Return the bytes per element: less than 1 for bool and for 4-bit and 2-bit formats.

    Args:
        dtype: a dtype of torch, or a `CustomDtype`.
    """
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
    """Return the bytes of every module, parameter and buffer by full name; `""` is the whole model.

    A tensor with several names is counted only under the first one.

    Args:
        dtype: count floating-point tensors as if they had this dtype, but never as larger than they
            are.
        special_dtypes: the dtypes of individual tensors, by full name.
        buffers_only: don't count parameters.
    """
    special = special_dtypes or {}
    sizes: dict[str, float] = defaultdict(float)
    for name, tensor in named_module_tensors(model, recurse=True):
        if buffers_only and isinstance(tensor, nn.Parameter):
            continue
        element = dtype_byte_size(special.get(name, tensor.dtype))
        if name not in special and dtype is not None and tensor.dtype.is_floating_point:
            element = min(element, dtype_byte_size(dtype))
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * element
    return defaultdict(int, {name: math.ceil(size) for name, size in sizes.items()})


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
) -> int:
    """Return the bytes of all buffers.

    Args:
        dtype: see `compute_module_sizes`.
        special_dtypes: see `compute_module_sizes`.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Return the size and the names of the largest layers, which must each stay on one device.

    A layer is a module in the list, or inside one of these, that has no children or whose class is in
    `no_split_module_classes`.

    Args:
        no_split_module_classes: names of classes that stay on one device.
    """
    largest = 0
    names = list[str]()
    queue = list(modules)
    while queue:
        name, module = queue.pop(0)
        if _can_split(module, no_split_module_classes):
            queue = [(joined(name, n), child) for n, child in module.named_children()] + queue
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and the size and names of its largest layers."""
    sizes = compute_module_sizes(model)
    largest = get_max_layer_size(_parts("", model), sizes, _kept_whole(model, None))
    return sizes[""], largest


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a device; for the CPU, the limits of the process's cgroup apply."""
    if device.type in ("cpu", "meta", "mps"):
        import psutil

        return min([int(psutil.virtual_memory().available), *_left_in_cgroups()])
    modules = (torch.accelerator, "get_memory_info"), (torch.get_device_module(), "mem_get_info")
    for module, name in modules:
        if hasattr(module, name):
            with suppress(RuntimeError, NotImplementedError):
                return int(getattr(module, name)(device.index)[0])
    return free_memory(torch.device("cpu"))


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left in each control group of the process, counting file pages as free."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds not in ("memory", ""):  # the name in cgroups 1; cgroups 2 has none
                continue
            root = Path("/sys/fs/cgroup", kinds)
            limit, usage = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes")
                if kinds
                else ("memory.max", "memory.current")
            )
            inner = root / path.strip("/")
            # The limits of all parent groups apply. In a container, the path may be the host's.
            for group in (one for one in (inner, *inner.parents) if one.is_relative_to(root)):
                with suppress(OSError, ValueError):
                    left = int((group / limit).read_text()) - int((group / usage).read_text())
                    stat = dict(line.split() for line in (group / "memory.stat").open())
                    yield max(0, left + int(stat["active_file"]) + int(stat["inactive_file"]))


def _measure_memory() -> dict[DeviceName, int]:
    host = free_memory(torch.device("cpu"))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "mps":
        # mps shares the host's memory and has no index.
        return {"mps": host}
    count = 0 if device is None else torch.accelerator.device_count()
    kind = "cpu" if device is None else device.type
    return {**{at: free_memory(torch.device(kind, at)) for at in range(count)}, "cpu": host}


def get_max_memory(
    max_memory: Mapping[DeviceName, float | str] | None = None,
) -> dict[DeviceName, int]:
    """Return the bytes that each device may use: accelerators first, then `mps`, `cpu` and `disk`.

    Without an argument, the free memory of the devices is measured. Sizes are converted to whole
    bytes, even in the dict that the caller passed, because callers continue to use it.

    Args:
        max_memory: bytes by device, or strings such as "10GB"; None measures the free memory.

    Raises:
        ConfigurationError: a key is not a device.
    """
    if max_memory is None:
        return _measure_memory()
    order = ["mps", "cpu", "disk"]
    given: dict[DeviceName, int] = {}
    for key, size in max_memory.items():
        device = int(key.rpartition(":")[2]) if isinstance(key, str) and ":" in key else key
        if not isinstance(device, int) and device not in order:
            raise ConfigurationError(
                f"max_memory has the key {key!r}. Keys must be the index of an accelerator, 'mps',"
                f" 'cpu' or 'disk'.{did_you_mean(str(key), order)}"
            )
        given[device] = convert_file_size_to_int(size)
        if isinstance(max_memory, dict):
            max_memory[key] = given[device]
    accelerators = sorted(key for key in given if isinstance(key, int))
    return {key: given[key] for key in [*accelerators, *order] if key in given}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Return a `max_memory` that gives all accelerators about the same share of a model.

    Every accelerator except the last is limited to its share plus 1.25 times the size of a block or an
    average layer. No limit is above the given or measured one. If there is a single accelerator whose
    memory was measured, a tenth of it is left free for computing.

    Args:
        max_memory: see `get_max_memory`.
        no_split_module_classes: names of classes that stay on one device.
        dtype: see `compute_module_sizes`.
        special_dtypes: see `compute_module_sizes`.
        low_zero: leave as much memory free on the first accelerator as the others allow.
    """
    memory = get_max_memory(max_memory)
    devices = [key for key, size in memory.items() if isinstance(key, int) and size > 0]
    if len(devices) < 2:
        for device in devices if max_memory is None else ():
            memory[device] = int(memory[device] * 0.9)
        return memory
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    sharing = devices[1:] if low_zero else devices
    slack = _usual_size(model, sizes, _kept_whole(model, no_split_module_classes))
    limit = sizes[""] // len(sharing) + int(1.25 * slack)
    for device in sharing[:-1]:
        memory[device] = min(memory[device], limit)
    if low_zero:
        others = sum(memory[device] for device in sharing)
        memory[devices[0]] = min(memory[devices[0]], max(0, sizes[""] - others))
    return memory


def _usual_size(model: nn.Module, sizes: Mapping[str, int], no_split: Sequence[str]) -> int:
    """Return the mean size of the innermost modules, or the size of the largest unsplit block if larger."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    innermost = get_module_leaves(modules)
    mean = sum(modules[name] for name in innermost) // max(len(innermost), 1)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    blocks: dict[str, int] = {}
    for name, size in modules.items():
        if name and kinds[name] in no_split:
            blocks.setdefault(kinds[name], size)
    return max(mean, *blocks.values(), 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that are not the parent of another name."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def _kept_whole(model: nn.Module, classes: Collection[str] | str | None) -> list[str]:
    """Return the names of classes that are not split: `classes`, or the model's own list."""
    if classes is None:
        classes = getattr(model, "_no_split_modules", None)
    return [classes] if isinstance(classes, str) else list(classes or ())


# --- the map ----------------------------------------------------------------------------------


def _can_split(module: Any, no_split: Collection[str]) -> bool:
    whole = not isinstance(module, nn.Module) or type(module).__name__ in no_split
    return not whole and next(module.children(), None) is not None


def _parts(name: str, module: nn.Module) -> list[Item]:
    """Return the tensors and submodules of a module, under every name that each has."""
    parts = [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *((n, child) for n, child in module._modules.items() if child is not None),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]
    return [(joined(name, n), part) for n, part in parts]


def _tied_outside(name: str, tied: Collection[Sequence[str]]) -> list[str]:
    """Return the names outside of a module that refer to one of its parameters."""
    found: list[str] = []
    for group in tied:
        outside = [one for one in group if not within(one, name)]
        if len(outside) < len(group):
            found += outside
    return found


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[Item],
) -> tuple[int, list[str], list[Any]]:
    """Return the bytes of a module and the modules tied to it, and the names and modules of the latter.

    Args:
        tied_params: names outside the module that refer to one of its parameters.
        modules_to_treat: the modules in which these names are searched.
    """
    owners = [
        (parameter, name, module)
        for parameter in tied_params
        for name, module in modules_to_treat
        if within(parameter, name)
    ]
    more = sum(module_sizes.get(name, 0) - module_sizes.get(p, 0) for p, name, _ in owners)
    return module_size + more, [name for _, name, _ in owners], [one for _, _, one in owners]


def fallback_allocate(
    modules: Sequence[Item],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, list[Item]]:
    """Find a module, or a part of one, that fits into a size together with what is tied to it.

    Modules are tried in order, and each one before its parts.

    Returns:
        The name, the module, and the remaining modules: (None, None, `modules`) if nothing fits.
    """
    limit = convert_file_size_to_int(size_limit)
    queue = list(modules)
    while queue:
        name, module = queue.pop(0)
        tied = _tied_outside(name, tied_parameters or ())
        size = module_sizes.get(name, 0)
        size, owners, _ = get_module_size_with_ties(tied, size, module_sizes, queue)
        # An owner that is no longer in the queue did not fit.
        if size <= limit and len(owners) == len(tied):
            return name, module, _without(modules, name)
        if _can_split(module, no_split_module_classes or ()):
            queue = _parts(name, module) + queue
    return None, None, list(modules)


def _without(modules: Sequence[Item], found: str) -> list[Item]:
    """Return the modules without `found`; a module that contains it is replaced by its other parts."""
    left: list[Item] = []
    for name, module in modules:
        if name == found:
            continue
        if within(found, name):
            left += _without(_parts(name, module), found)
        else:
            left.append((name, module))
    return left


class Plan:
    """The assignment of a model's parts to devices, while it is made and when it is complete."""

    def __init__(
        self,
        model: nn.Module,
        memory: Mapping[DeviceName, float],
        sizes: Mapping[str, int],
        no_split: list[str],
    ) -> None:
        self.memory = memory
        self.sizes = sizes
        self.no_split = no_split
        self.tied = find_tied_parameters(model)
        self.queue = _parts("", model)
        self.accelerators = [device for device in memory if device not in ("cpu", "disk")]
        #: On these devices memory is reserved, because offloaded layers return to them one by one.
        self.main = {*self.accelerators[:1], "cpu"}
        if "mps" in memory:
            self.main = {"mps"}
        self.used = dict.fromkeys(memory, 0)
        #: Bytes of weights by device, without the reserved memory.
        self.held = dict.fromkeys(memory, 0)
        self.placed: dict[str, DeviceName] = {}
        #: For each device that got no part, the bytes that the first part would have needed.
        self.lacking: dict[DeviceName, int] = {}
        self.log: list[str] = []
        reserve, largest = get_max_layer_size(self.queue, sizes, no_split)
        self.reserve = reserve
        self.largest = largest

    def fill(self, fallback: bool) -> None:
        """Assign all parts, one device after the other."""
        for device in self.memory:
            while self.queue and self._place_next(device, fallback):
                pass

    def _place_next(self, device: DeviceName, fallback: bool) -> bool:
        """Assign, split or postpone the first part; return False if the device is full."""
        name, module = self.queue.pop(0)
        # Memory is reserved for the largest of the remaining layers.
        self.largest = [one for one in self.largest if not within(one, name)]
        if not self.largest:
            self._measure()
        reserve = self.reserve if device in self.main else 0
        left = self.memory[device] - reserve - self.used[device]
        size = self.sizes.get(name, 0)
        whole, names, modules = get_module_size_with_ties(
            _tied_outside(name, self.tied), size, self.sizes, self.queue
        )
        if whole <= left:
            self._put([name, *names], whole, device)
            return True
        self.queue.insert(0, (name, module))
        # If the part alone fits, it may be enough to split the large modules that are tied to it.
        pairs = zip(names, modules) if size <= left else ()
        parted = [one for one, its in pairs if _can_split(its, self.no_split)]
        if size >= left and _can_split(module, self.no_split):
            parted.append(name)
        if parted:
            self._split(parted[0])
            return True
        if not self.used[device]:
            limit = int(self.memory[device]) - max(self.reserve, whole)
            if fallback and self._bring_forward(limit):
                return True
            self.lacking[device] = whole + reserve
        kept = f" ({reserve} bytes are reserved for the largest offloaded layer)" if reserve else ""
        self.log.append(
            f"{device} is full: {name} needs {whole} bytes, but {max(0, int(left))} are left{kept}."
        )
        self.used[device] += reserve
        return False

    def _measure(self) -> None:
        modules = [item for item in self.queue if isinstance(item[1], nn.Module)]
        reserve, largest = get_max_layer_size(modules, self.sizes, self.no_split)
        self.reserve = reserve
        self.largest = largest

    def _put(self, names: list[str], size: int, device: DeviceName) -> None:
        self.used[device] += size
        self.held[device] += size
        self.placed.update(dict.fromkeys(names, device))
        if len(names) > 1:
            self.queue = [item for item in self.queue if item[0] not in names]
        self.log.append(f"{', '.join(dict.fromkeys(names))} ({size} bytes) goes to {device}.")

    def _split(self, name: str) -> None:
        at = next(index for index, item in enumerate(self.queue) if item[0] == name)
        self.queue[at : at + 1] = _parts(*self.queue[at])
        self._measure()

    def _bring_forward(self, limit: int) -> bool:
        """Move a later part that fits to the front of the queue; return False if there is none."""
        found, module, rest = fallback_allocate(
            self.queue[1:], self.sizes, limit, self.no_split, self.tied
        )
        if found is not None:
            self.queue = [(found, module), self.queue[0], *rest]
        return found is not None


def plan_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    fallback_allocation: bool = False,
) -> Plan:
    """Assign each part of a model to a device, and record why; see `infer_auto_device_map`."""
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    memory: dict[DeviceName, float] = {**get_max_memory(max_memory), "disk": math.inf}
    plan = Plan(model, memory, sizes, _kept_whole(model, no_split_module_classes))
    plan.fill(fallback_allocation)
    return plan


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceName, float | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, DeviceName]:
    """Assign the parts of a model, in order, to the accelerators, then the CPU, then the disk.

    Only the sizes of weights count, not those of activations. On the first accelerator and on the CPU,
    memory is reserved for the largest remaining layer, because offloaded layers are loaded there to
    run. Modules with tied parameters go to the same device.

    Args:
        max_memory: limits by device, in bytes or as strings such as "10GB"; None measures the free
            memory. The disk has no limit.
        no_split_module_classes: names of classes that stay on one device, such as blocks with
            residual connections; by default the model's own `_no_split_modules`.
        dtype: count floating-point tensors as if they had this dtype.
        special_dtypes: the dtypes of individual tensors, by full name.
        verbose: print each decision.
        clean_result: merge the entries of a module that is on one device as a whole.
        offload_buffers: also offload the buffers of offloaded modules.
        fallback_allocation: if the next part doesn't fit on an empty device, look for a later part
            that does.

    Returns:
        Devices by full module name: indices of accelerators, `"cpu"` or `"disk"`.
    """
    plan = plan_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, fallback_allocation
    )
    memory = plan.memory
    if verbose:
        print("\n".join(plan.log))
    if plan.lacking:
        needs = ", ".join(f"{device} (needs {size} bytes)" for device, size in plan.lacking.items())
        logger.info("Nothing was assigned to %s: insufficient memory for the first part.", needs)
    buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    away = sum(buffers.get(n, 0) for n, place in plan.placed.items() if place in ("cpu", "disk"))
    left = [memory[device] - plan.used[device] for device in plan.accelerators]
    if left and away > max(0, *left) and not offload_buffers:
        warn(
            f"The buffers of the offloaded modules need {away} bytes, more than is left on any"
            " accelerator. Pass offload_buffers=True to offload them, too.",
        )
    return clean_device_map(plan.placed) if clean_result else plan.placed


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge the entries of every module that is on one device, in place, and return the map.

    Args:
        module_name: the module whose entries are merged; "" is the whole model.
    """
    prefix = joined(module_name, "")
    inside = [name for name in device_map if name.startswith(prefix) and name != module_name]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
    else:
        for child in dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in inside):
            clean_device_map(device_map, prefix + child)
    return device_map
