"""The parts of the Accelerator class that depend on plugins: mesh properties and the signature."""

from __future__ import annotations

import inspect
from typing import Any, cast

from accelerate_core.plugins.selection import plugin_arguments


def mesh_rank(dimension: str) -> Any:
    """Return a property for the rank in one dimension of the device mesh."""

    def rank(self: Any) -> int:
        mesh = self.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return int(mesh.get_local_rank(dimension)) if dimension in names else 0

    return property(rank, doc=f"Rank in the mesh dimension `{dimension}`, or 0 without it.")


class MeshVerbs:
    """The device mesh of an Accelerator."""

    hooks: Any
    backend: Any

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, or None if the backend has none."""
        return self.hooks.mesh()

    def sub_mesh(self, name: str) -> Any:
        """Return a submesh: one dimension, or the combined `dp`, `dp_shard_cp` or `dp_cp`.

        Raises:
            ConfigurationError: there is no mesh, or it has no such part.
        """
        return self.backend.sub_mesh(name)

    tensor_parallel_rank: int = mesh_rank("tp")
    pipeline_parallel_rank: int = mesh_rank("pp")
    context_parallel_rank: int = mesh_rank("cp")
    data_parallel_rank: int = mesh_rank("dp_replicate")
    data_parallel_shard_rank: int = mesh_rank("dp_shard")


class ShowsPluginArguments(type):
    """`inspect.signature(Accelerator)` includes the arguments of installed plugins."""

    @property
    def __signature__(cls) -> inspect.Signature:
        _, *parameters = inspect.signature(cast(Any, cls).__init__).parameters.values()
        extra = sorted(plugin_arguments() - {one.name for one in parameters})
        kind = inspect.Parameter.KEYWORD_ONLY
        from_plugins = [inspect.Parameter(name, kind, default=None) for name in extra]
        return inspect.Signature([*parameters[:-1], *from_plugins])
