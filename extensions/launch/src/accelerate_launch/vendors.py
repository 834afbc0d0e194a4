"""What torch can't say about the devices that are part of torch itself."""

from __future__ import annotations

from accelerate_core.plugin import DevicePlugin


class CUDA(DevicePlugin):
    """NVIDIA's devices, and AMD's, which torch calls by the same name and which read the same variable."""

    name = "cuda"
    visible_devices = "CUDA_VISIBLE_DEVICES"
    builds = ("cuda", "hip", "rocm")
    label = "GPU"
    float64 = True


class XPU(DevicePlugin):
    """Intel's devices. Not all of them compute in float64."""

    name = "xpu"
    visible_devices = "ZE_AFFINITY_MASK"
    builds = ("xpu",)


class MPS(DevicePlugin):
    """The device of Apple's computers, which has no collectives, no float64 and no list of devices."""

    name = "mps"
