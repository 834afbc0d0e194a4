"""Where an Accelerator is: setup, mesh, directories."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from accelerate_core.config.enums import DistributedType
from accelerate_core.facade.base import FacadeBase
from accelerate_core.plugins.manager import blaming
from accelerate_core.state import AcceleratorState


class Place(FacadeBase):
    """Where an Accelerator is: setup, mesh, directories."""

    @property
    def state(self) -> AcceleratorState:
        """The setup as user code reads it."""
        return AcceleratorState(self)

    @property
    def distributed_type(self) -> DistributedType:
        """Which kind of setup runs, as the active backend names it."""
        with blaming("distributed_type", self._built.selection.record):
            said = self.backend.distributed_type(self._whole)
            return cast(DistributedType, DistributedType(said))

    @property
    def multi_device(self) -> bool:
        """Whether more than one device is in use."""
        return self.use_distributed

    @property
    def local_process_count(self) -> int:
        """Number of processes on this machine."""
        return self._process.local_num_processes

    @property
    def group_timeout(self) -> timedelta | None:
        """How long a collective may take; None is torch's default."""
        return self._process.timeout

    @property
    def device_count(self) -> int:
        """How many devices this world computes on; one per process, unless the backend has more."""
        return int(self.hooks.device_count(self))

    @property
    def mixed_precision(self) -> str:
        """Name of the precision in force."""
        return self._built.precision_record.name

    @property
    def scaler(self) -> Any | None:
        """The gradient scaler, None where losses are not scaled."""
        return self._scaler

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether one rank reads and sends; None: for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated so that every rank has equal batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is a function of seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's StatefulDataLoader is used."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> Any:
        """Root of logs and checkpoints."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    @property
    def saves_here(self) -> bool:
        """Whether this process writes what is saved once (per machine, if so configured)."""
        if self.project_configuration.save_on_each_node:
            return self.is_local_main_process
        return self.is_main_process

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes models."""
        return self.saves_here

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh, None where there is none."""
        return self.hooks.mesh(self)

    def sub_mesh(self, name: str) -> Any:
        """Return a part of the device mesh: of one dimension, or `dp`, `dp_shard_cp`, `dp_cp`.

        Raises:
            ConfigurationError: the mesh has no such part, or there is no mesh.
        """
        return self.backend.sub_mesh(name)

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the mesh's dimensions (`ParallelismConfig`), None where there is no mesh."""
        return self._built.parallelism

    def _mesh_rank(self, dimension: str) -> int:
        mesh = self.torch_device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return int(mesh.get_local_rank(dimension))

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank in the mesh dimension `tp`, 0 without one."""
        return self._mesh_rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank in the mesh dimension `pp`, 0 without one."""
        return self._mesh_rank("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Rank in the mesh dimension `cp`, 0 without one."""
        return self._mesh_rank("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Rank in the mesh dimension `dp_replicate`, 0 without one."""
        return self._mesh_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank in the mesh dimension `dp_shard`, 0 without one."""
        return self._mesh_rank("dp_shard")
