"""Settings classes that read environment variables when they are created, as in Accelerate."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from accelerate_core.config import handlers, parallelism
from accelerate_core.config.lookup import look_up
from accelerate_core.plugin import ConfigurationError, Sources, listing, settings_fields
from accelerate_drop_in import private  # noqa: F401  (adds `get_device_mesh`)


def _filled(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with values from the environment for missing ones."""
    fields = settings_fields(cls)
    sources = Sources(dict(os.environ))
    given = dict(zip((field.name for field in fields), args, strict=False)) | kwargs
    for field in fields:
        if given.get(field.name) is None:
            found = look_up(field, sources)
            if found.origin != "default":
                given[field.name] = found.value
    return given


class TorchDynamoPlugin(handlers.TorchDynamoPlugin):
    """The settings for compiling models."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_filled(handlers.TorchDynamoPlugin, args, kwargs))


class ParallelismConfig(parallelism.ParallelismConfig):
    """The sizes of a device mesh's dimensions, with a method that creates the mesh."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**_filled(parallelism.ParallelismConfig, args, kwargs))
        if self.size("cp") > 1 and self.cp_handler is None:
            from accelerate_core.utils import TorchContextParallelConfig

            cls: Any = TorchContextParallelConfig
            self.cp_handler = cls(**_filled(cls, (), {}))

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The sizes by dimension. Clients add dimensions of their own."""
        return {name: self.size(name) for name in self.DIMENSIONS if name != "pp"}

    def _set_size(self, parallelism: str, size: int) -> None:
        """Set the size of a dimension."""
        if parallelism not in self._sizes:
            raise ConfigurationError(
                f"{parallelism!r} is not a dimension. The dimensions are {listing(self._sizes)}."
            )
        self._sizes[parallelism] = size
        setattr(self, f"{parallelism}_size", size)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check that the sizes match the number of processes. Clients replace this."""
        if self.total_size > 1:
            self.check(accelerator.num_processes)

    def refuse_other_dimensions(self) -> None:
        """Refuse dimensions of more than one rank that a client has added.

        Raises:
            ConfigurationError: there is one.
        """
        other = [n for n, size in self._sizes.items() if n not in self.DIMENSIONS and size > 1]
        if other:
            raise ConfigurationError(
                f"ParallelismConfig has {other[0]}_size={self._sizes[other[0]]}, but accelerate-core has no "
                f"dimension {other[0]!r}."
            )

    def _get_mesh(self) -> tuple[tuple[Any, ...], ...]:
        """Return the names and sizes of dimensions with more than one rank, outermost first."""
        return tuple(zip(*((name, self.size(name)) for name in self.active_mesh_dims), strict=True))

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all processes, with the flattened dimensions `dp`, `dp_shard_cp` and `dp_cp`."""
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
