"""The rank of this process and the world size, its device, and how the process group starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


#: Variables for rank, world size, local rank and local world size, of torchrun and each MPI.
_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"
    " OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
)


@dataclass
class Topology:
    """The rank of this process and the world size, as set by the launcher."""

    #: Rank in the world.
    process_index: int = 0
    #: World size.
    num_processes: int = 1
    #: Rank on this machine.
    local_process_index: int = 0
    #: Number of processes on this machine.
    local_num_processes: int = 1
    source: str = "not started by a launcher"


@dataclass(kw_only=True)
class Process(Topology):
    """The rank of this process, its device, and how the process group starts."""

    device: torch.device
    #: The ranks' key-value store (`torch.distributed.Store`), None on one process.
    store: dist.Store | None = None
    #: How long a collective may take; None means torch's default.
    timeout: timedelta | None = None
    #: Requested communication backend, such as gloo; None means torch's default for the device.
    comm_backend: str | None = None
    #: Rendezvous URL, used instead of the store.
    init_method: str | None = None


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Read rank and world size from the environment variables of torchrun or an MPI.

    Raises:
        ConfigurationError: a variable is not a number, or the rank is outside the world.
    """
    for names in map(str.split, _RANK_VARIABLES):
        rank_name, size_name, local_name, local_size_name = names
        said = {name: _number(environ, name) for name in names if name in environ}
        if rank_name not in said or size_name not in said:
            continue
        rank, size = said[rank_name], said[size_name]
        if not 0 <= rank < size:
            raise ConfigurationError(
                f"{rank_name}={rank} is outside a world of {size_name}={size}."
            )
        source = f"environment variables {rank_name}={rank}, {size_name}={size}"
        local, local_size = said.get(local_name, rank), said.get(local_size_name, size)
        return Topology(rank, size, local, local_size, source)
    return Topology()


def check_launched(topology: Topology, environ: Mapping[str, str]) -> None:
    """Refuse to train alone in one of several tasks that SLURM started, if no plugin read their ranks.

    Without ranks, every task would train a separate model. If that is intended, set `RANK=0 WORLD_SIZE=1`.

    Raises:
        ConfigurationError: says what to install.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    launched = topology.num_processes > 1 or {"RANK", "WORLD_SIZE"} <= environ.keys()
    if launched or not tasks.isdigit() or int(tasks) <= 1:
        return
    raise ConfigurationError(
        f"This process is one of {tasks} tasks of a SLURM step, but RANK and WORLD_SIZE are not set, so "
        "each of them would train a separate model as rank 0 of 1. Install accelerate-launch, which reads "
        "their ranks from SLURM. If each of them should train alone, set RANK=0 and WORLD_SIZE=1."
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"Environment variable {name}={environ[name]!r} must be a number."
        ) from None
