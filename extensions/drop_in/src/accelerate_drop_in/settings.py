"""Settings classes that read their variables when they are made, as those of the original do."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from accelerate_core.config import handlers, parallelism
from accelerate_core.config.lookup import Sources, look_up
from accelerate_core.config.schema import settings_fields
from accelerate_core.errors import ConfigurationError


def _filled(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with what the environment says of those not given."""
    fields, sources = settings_fields(cls), Sources(dict(os.environ))
    given = dict(zip((field.name for field in fields), args, strict=False)) | kwargs
    for field in fields:
        if given.get(field.name) is None and (found := look_up(field, sources)).origin != "default":
            given[field.name] = found.value
    return given


class TorchDynamoPlugin(handlers.TorchDynamoPlugin):
    """How models are compiled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_filled(handlers.TorchDynamoPlugin, args, kwargs))


class ParallelismConfig(parallelism.ParallelismConfig):
    """Sizes of the dimensions of a device mesh, which it can make itself."""

    device_mesh: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_filled(parallelism.ParallelismConfig, args, kwargs))
        if self.size("cp") > 1 and self.cp_handler is None:
            from accelerate_core.utils import TorchContextParallelConfig

            cls = TorchContextParallelConfig
            self.cp_handler = cls(**_filled(cls, (), {}))

    def _get_mesh(self) -> tuple[tuple[Any, ...], ...]:
        """Return names and sizes of the dimensions with more than one rank, outermost first."""
        return tuple(zip(*((name, self.size(name)) for name in self.active_mesh_dims), strict=True))

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all processes, with `dp`, `dp_shard_cp` and `dp_cp` laid over it."""
        import torch.distributed.device_mesh as meshes

        names, sizes = self._get_mesh()
        mesh = meshes.init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for name, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if parts:
                mesh[parts]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the mesh, made at the first call.

        Raises:
            ConfigurationError: it is not made and there is no device, or it is one of other devices.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError('The first call needs the devices, such as "cuda".')
            self.device_mesh = self.build_device_mesh(device_type)
        if device_type not in (None, self.device_mesh.device_type):
            raise ConfigurationError(
                f"The mesh is one of {self.device_mesh.device_type} devices, not of {device_type}."
            )
        mesh: DeviceMesh = self.device_mesh
        return mesh
