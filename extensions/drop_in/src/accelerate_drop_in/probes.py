"""Accelerate's functions `is_…_available`, with the same arguments as there.

They call the functions in other packages of accelerate-core, which may have other arguments.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from packaging.version import Version

from accelerate_core.plugin import env_flag

_BY_PLACE = inspect.Parameter.POSITIONAL_OR_KEYWORD
#: Arguments of Accelerate's functions for devices, with their defaults. They have no effect here,
#: because a device is available if torch can use it.
_SWITCHES = {
    "is_hpu_available": {"init_hccl": False},
    **{
        f"is_{device}_available": {"check_device": False}
        for device in ("mlu", "musa", "neuron", "npu", "sdaa", "xpu")
    },
}


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy is installed in at least the given version."""
    return find_spec("numpy") is not None and Version(version("numpy")) >= Version(min_version)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed.

    Args:
        check_is_tpu: also require that its device is a TPU.
        check_is_gpu: also require that its device is a GPU.

    Raises:
        ValueError: both arguments are true.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError(
            "check_is_tpu=True and check_is_gpu=True cannot be used together. Pass one of them."
        )
    wanted = env_flag(dict(os.environ), "USE_TORCH_XLA", default=True)
    if not wanted or find_spec("torch_xla") is None:
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("CUDA", "GPU")


def __getattr__(name: str) -> Any:
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(name)
    found = getattr(importlib.import_module("accelerate_core.utils"), name)
    kinds = {one.kind for one in inspect.signature(found).parameters.values()}
    if not isinstance(found, FunctionType) or inspect.Parameter.VAR_POSITIONAL in kinds:
        found = _with_arguments(name, found)
    globals()[name] = found
    return found


def _with_arguments(name: str, asked: Callable[[], bool]) -> Callable[..., bool]:
    """Return a function that calls `asked`, with the name and the arguments of Accelerate's function."""
    parameters = [
        inspect.Parameter(argument, _BY_PLACE, default=default)
        for argument, default in _SWITCHES.get(name, {}).items()
    ]
    signature = inspect.Signature(parameters, return_annotation=bool)

    def probe(*args: Any, **kwargs: Any) -> bool:
        signature.bind(*args, **kwargs)
        return asked()

    probe.__name__ = probe.__qualname__ = name
    probe.__doc__ = asked.__doc__
    vars(probe)["__signature__"] = signature
    return probe
