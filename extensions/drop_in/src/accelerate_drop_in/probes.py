"""`is_…_available()`: what is installed and what the hardware can. None of them raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from packaging.version import InvalidVersion, Version

#: Probe → the import name of the library.
LIBRARIES: dict[str, str] = {
    "is_amdsmi_available": "amdsmi",
    "is_boto3_available": "boto3",
    "is_datasets_available": "datasets",
    "is_import_timer_available": "import_timer",
    "is_lomo_available": "lomo_optim",
    "is_matplotlib_available": "matplotlib",
    "is_numpy_available": "numpy",
    "is_pandas_available": "pandas",
    "is_peft_available": "peft",
    "is_pynvml_available": "pynvml",
    "is_pytest_available": "pytest",
    "is_rich_available": "rich",
    "is_sagemaker_available": "sagemaker",
    "is_schedulefree_available": "schedulefree",
    "is_timm_available": "timm",
    "is_torchdata_available": "torchdata",
    "is_torchvision_available": "torchvision",
    "is_tqdm_available": "tqdm",
    "is_transformers_available": "transformers",
    "is_triton_available": "triton",
}

#: Probe → the name under which torch, or an extension of it, has the device.
DEVICES: dict[str, str] = {
    "is_hpu_available": "hpu",
    "is_mlu_available": "mlu",
    "is_musa_available": "musa",
    "is_neuron_available": "neuron",
    "is_npu_available": "npu",
    "is_sdaa_available": "sdaa",
    "is_xpu_available": "xpu",
}


def _installed(library: str, min_version: str | None = None, distribution: str = "") -> bool:
    try:
        spec = importlib.util.find_spec(library)
        # A folder of that name on the path is found too, but it has no origin.
        if spec is None or spec.origin is None:
            return False
        if min_version is None:
            return True
        version = importlib.metadata.version(distribution or library)
        return Version(version) >= Version(min_version)
    except (ImportError, ValueError, InvalidVersion, importlib.metadata.PackageNotFoundError):
        return False


def _device(kind: str, *_: Any, **__: Any) -> bool:
    import torch

    try:
        return bool(getattr(torch, kind).is_available())
    except (AttributeError, RuntimeError):
        return False


def _is_cuda_available() -> bool:
    """Say whether CUDA (or ROCm under its name) has a device."""
    import torch

    return torch.cuda.is_available()


def _is_rocm_available() -> bool:
    """Say whether torch is built for ROCm and has a device."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def _is_mps_available(min_version: str = "1.12") -> bool:
    """Say whether Apple's GPU can be used, with a torch not older than a version."""
    import torch

    from accelerate_drop_in.versions import is_torch_version

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Say whether the current device computes in bfloat16; CPUs do."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return True
    supported = getattr(torch.get_device_module(device.type), "is_bf16_supported", None)
    return bool(supported()) if supported is not None else True


def _is_fp16_available() -> bool:
    """Say whether the current device computes in float16; CPUs do since torch 2.3."""
    return not _is_habana_gaudi1()


def _is_habana_gaudi1() -> bool:
    """Say whether the device is a first generation Gaudi."""
    if not _device("hpu"):
        return False
    import torch

    name = str(torch.get_device_module("hpu").get_device_name()).strip()
    return name.upper() == "GAUDI"


def _is_xccl_available() -> bool:
    """Say whether torch has Intel's collectives built in."""
    import torch.distributed as dist

    return dist.is_available() and bool(getattr(dist, "is_xccl_available", bool)())


def _is_pippy_available() -> bool:
    """Say whether torch has `torch.distributed.pipelining`."""
    import torch.distributed as dist

    return (
        dist.is_available() and importlib.util.find_spec("torch.distributed.pipelining") is not None
    )


def _is_weights_only_available() -> bool:
    """Say whether `torch.load` can refuse code; every supported torch can."""
    return True


def _is_bnb_available(min_version: str | None = None) -> bool:
    """Say whether bitsandbytes is installed, not older than a version."""
    return _installed("bitsandbytes", min_version)


def _is_torchdata_stateful_dataloader_available() -> bool:
    """Say whether torchdata is installed and new enough for its `StatefulDataLoader`."""
    return _installed("torchdata", "0.8.0")


_SPECIAL: dict[str, Callable[..., bool]] = {
    "is_4bit_bnb_available": partial(_is_bnb_available, "0.39.0"),
    "is_8bit_bnb_available": partial(_is_bnb_available, "0.37.2"),
    "is_bf16_available": _is_bf16_available,
    "is_bitsandbytes_multi_backend_available": partial(_is_bnb_available, "0.46.0"),
    "is_bnb_available": _is_bnb_available,
    "is_cuda_available": _is_cuda_available,
    "is_fp16_available": _is_fp16_available,
    "is_habana_gaudi1": _is_habana_gaudi1,
    "is_mps_available": _is_mps_available,
    "is_pippy_available": _is_pippy_available,
    "is_rocm_available": _is_rocm_available,
    "is_torchdata_stateful_dataloader_available": _is_torchdata_stateful_dataloader_available,
    "is_weights_only_available": _is_weights_only_available,
    "is_xccl_available": _is_xccl_available,
}

NAMES = (*LIBRARIES, *DEVICES, *_SPECIAL)


def probe(name: str) -> Callable[..., bool]:
    """Return the probe of a name in `NAMES`."""
    if name in _SPECIAL:
        return _SPECIAL[name]
    made = (
        partial(_device, DEVICES[name]) if name in DEVICES else partial(_installed, LIBRARIES[name])
    )
    made.__doc__ = f"Say whether {DEVICES.get(name) or LIBRARIES[name]} can be used here."
    return made


def __getattr__(name: str) -> Callable[..., bool]:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return probe(name)
