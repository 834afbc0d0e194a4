"""Accelerate's small utilities: names, sizes, and saving and loading one object."""

from __future__ import annotations

import codecs
import functools
import importlib
import platform
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from accelerate_core.plugin import listing
from accelerate_tracking.rank_logger import get_logger

#: Named after Accelerate's module, because scripts set log levels by that name.
logger = get_logger("accelerate.utils.other")

_OLDEST_KERNEL = Version("5.5.0")


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return a nested attribute, such as `recursive_getattr(model, "encoder.layer.0")`."""
    for part in attr.split("."):
        obj = getattr(obj, part)
    return obj


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge `source` recursively into `destination`, and return `destination`."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            inner = destination.get(key)
            destination[key] = merge_dicts(value, inner if isinstance(inner, dict) else {})
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Format a number of bytes with a unit, such as `"1.5 MB"`. Units are powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or else of the object's class."""
    for owner in (obj, type(obj)):
        name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None)
        if name:
            return str(name)
    return str(obj)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules, from the deepest level up to `model` itself.

    With `return_fqns`, each entry is a pair of full name and module.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    queue = deque([("", model)])
    while queue:
        name, module = queue.popleft()
        found.append((name, module))
        queue.extend((f"{name}.{n}" if name else n, child) for n, child in module.named_children())
    found.reverse()
    return list(found) if return_fqns else [module for _, module in found]


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether any parameter is a DTensor, so is sharded or replicated over a device mesh."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_os_kernel() -> None:
    """Warn if the Linux kernel is so old that data loading may hang."""
    system = platform.uname()
    if system.system != "Linux":
        return
    try:
        kernel = Version(system.release.split("-")[0].rstrip("+"))
    except InvalidVersion:
        return
    if kernel < _OLDEST_KERNEL:
        logger.warning(
            f"The Linux kernel {kernel} is older than {_OLDEST_KERNEL}, so processes may hang."
        )


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call `torch.load`, but refuse everything except tensors, arrays and plain containers.

    For files with other objects, pass `weights_only=False`. This runs code from the file, so only do
    it with files that you trust.

    Args:
        map_location: the device for tensors, as in `torch.load`.
    """
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(_safe_globals()):
        return torch.load(f, map_location=map_location, **kwargs)


@functools.cache
def _safe_globals() -> list[Any]:
    """Return the classes in pickled NumPy arrays, which Accelerate's random states contain."""
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError:
        return []
    return [
        *(_numpy_core().multiarray._reconstruct, numpy.ndarray, numpy.dtype),
        *(codecs.encode, numpy.dtypes.UInt32DType),
    ]


def _numpy_core() -> Any:
    new = importlib.import_module("numpy").__version__ >= "2"
    return importlib.import_module("numpy._core" if new else "numpy.core")


def __getattr__(name: str) -> Any:
    if name == "TORCH_SAFE_GLOBALS":
        return _safe_globals()
    if name == "np_core":
        return _numpy_core()
    raise AttributeError(name)


def save(
    obj: Any,
    f: str | Path | Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object from the main process, or from the first process on each node.

    Args:
        obj: anything that `torch.save` accepts; with `safe_serialization`, a dict of tensors.
        f: a path or, without `safe_serialization`, an open file.
        save_on_each_node: write once per node, for disks that are not shared.
        safe_serialization: use safetensors.
    """
    from accelerate_core.distributed.process import current_runtime

    runtime = current_runtime()
    if (runtime.local_process_index if save_on_each_node else runtime.process_index) != 0:
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    from safetensors.torch import save_file

    from accelerate_checkpoint.weights import clean_state_dict_for_safetensors

    kept = clean_state_dict_for_safetensors(obj)
    if missing := sorted(set(obj) - set(kept)):
        logger.warning(
            f"Removed shared tensor(s) {listing(missing)} from {f}, because they are already saved under "
            "another name."
        )
    save_file(kept, f, metadata={"format": "pt"})
