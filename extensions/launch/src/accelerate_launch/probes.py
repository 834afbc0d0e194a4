"""Functions `is_…_available()` that check versions, devices or the build of torch.

Those that only check whether a library is installed are in the core. They never raise.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial
from typing import Any

from packaging.version import InvalidVersion, Version


def _installed(library: str, min_version: str | None) -> bool:
    try:
        spec = importlib.util.find_spec(library)
        # A folder of that name on the path is found too, but it has no origin.
        if spec is None or spec.origin is None:
            return False
        if min_version is None:
            return True
        return Version(importlib.metadata.version(library)) >= Version(min_version)
    except (ImportError, ValueError, InvalidVersion):
        return False


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed.

    Args:
        min_version: the oldest accepted version, such as "0.39.0"; None accepts any.
    """
    return _installed("bitsandbytes", min_version)


#: Whether bitsandbytes is installed and new enough for the named feature.
is_8bit_bnb_available = partial(is_bnb_available, "0.37.2")
is_4bit_bnb_available = partial(is_bnb_available, "0.39.0")
is_bitsandbytes_multi_backend_available = partial(is_bnb_available, "0.46.0")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata is installed and new enough for its `StatefulDataLoader`."""
    return _installed("torchdata", "0.8.0")


def is_weights_only_available() -> bool:
    """Return whether `torch.load` supports `weights_only`, as every supported torch does."""
    return True


def _device(kind: str, *_: Any, **__: Any) -> bool:
    """Return whether torch, or an extension of it, has a device of this kind here."""
    import torch

    try:
        return bool(getattr(torch, kind).is_available())
    except (AttributeError, RuntimeError):
        return False


#: Whether torch, or an extension of it, has a device of this kind here.
is_cuda_available = partial(_device, "cuda")
is_hpu_available = partial(_device, "hpu")
is_mlu_available = partial(_device, "mlu")
is_musa_available = partial(_device, "musa")
is_neuron_available = partial(_device, "neuron")
is_npu_available = partial(_device, "npu")
is_sdaa_available = partial(_device, "sdaa")
is_xpu_available = partial(_device, "xpu")


def is_rocm_available() -> bool:
    """Return whether torch is built for ROCm and has a device."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch can use Apple's GPU.

    Args:
        min_version: the oldest accepted version of torch, such as "2.1".
    """
    import torch

    return (
        Version(Version(torch.__version__).base_version) >= Version(min_version)
        and torch.backends.mps.is_available()
    )


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the current device supports bfloat16. CPUs do.

    Args:
        ignore_tpu: accepted for compatibility with Accelerate, and ignored.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return True
    supported = getattr(torch.get_device_module(device.type), "is_bf16_supported", None)
    return bool(supported()) if supported is not None else True


def is_fp16_available() -> bool:
    """Return whether the current device supports float16. CPUs do since torch 2.3."""
    return not is_habana_gaudi1()


def is_habana_gaudi1() -> bool:
    """Return whether the device is a first-generation Gaudi."""
    if not _device("hpu"):
        return False
    import torch

    name = str(torch.get_device_module("hpu").get_device_name()).strip()
    return name.upper() == "GAUDI"


def is_xccl_available() -> bool:
    """Return whether torch was built with Intel's collectives (XCCL)."""
    import torch.distributed as dist

    return dist.is_available() and bool(getattr(dist, "is_xccl_available", bool)())


def is_pippy_available() -> bool:
    """Return whether torch has `torch.distributed.pipelining`, as every supported torch does."""
    import torch.distributed as dist

    return dist.is_available()
