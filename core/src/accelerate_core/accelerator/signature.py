"""What the Accelerator's class shows of plugins and meshes."""

from __future__ import annotations

import inspect
from typing import Any, cast

from accelerate_core.plugins.selection import plugin_arguments


def mesh_rank(dimension: str) -> Any:
    """Return the property of a rank in one dimension of the device mesh."""

    def rank(self: Any) -> int:
        mesh = self.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return int(mesh.get_local_rank(dimension)) if dimension in names else 0

    return property(rank, doc=f"Rank in the mesh dimension `{dimension}`, 0 without one.")


class MeshVerbs:
    """The device mesh, as a script reads it."""

    hooks: Any
    backend: Any

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, None where there is none."""
        return self.hooks.mesh()

    def sub_mesh(self, name: str) -> Any:
        """Return a part of the device mesh: of one dimension, or `dp`, `dp_shard_cp`, `dp_cp`.

        Raises:
            ConfigurationError: the mesh has no such part, or there is no mesh.
        """
        return self.backend.sub_mesh(name)

    tensor_parallel_rank: int = mesh_rank("tp")
    pipeline_parallel_rank: int = mesh_rank("pp")
    context_parallel_rank: int = mesh_rank("cp")
    data_parallel_rank: int = mesh_rank("dp_replicate")
    data_parallel_shard_rank: int = mesh_rank("dp_shard")


class ShowsPluginArguments(type):
    """`inspect.signature(Accelerator)` lists what the installed plugins take, too."""

    @property
    def __signature__(cls) -> inspect.Signature:
        _, *parameters = inspect.signature(cast(Any, cls).__init__).parameters.values()
        extra = sorted(plugin_arguments() - {one.name for one in parameters})
        kind = inspect.Parameter.KEYWORD_ONLY
        from_plugins = [inspect.Parameter(name, kind, default=None) for name in extra]
        return inspect.Signature([*parameters[:-1], *from_plugins])
