"""Access to the device mesh, which every Accelerator with this backend has."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from accelerate_core.plugin import AcceleratorView, ParallelismConfig, SetupView


def sizes_of(setup: SetupView) -> ParallelismConfig:
    """Return the sizes of the mesh."""
    sizes = setup.parallelism_config
    assert sizes is not None
    return sizes


def mesh_of(accelerator: AcceleratorView) -> DeviceMesh:
    """Return the device mesh."""
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    return mesh
