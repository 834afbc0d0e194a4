"""Which of how many processes this is, where it runs, and what starting their group takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelerate_core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


#: Rank, world size, local rank and local world size, as torchrun and each MPI spell them.
_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"
    " OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
)


@dataclass
class Topology:
    """Which of how many processes this is, as the launcher said."""

    #: Rank in the world.
    process_index: int = 0
    #: World size.
    num_processes: int = 1
    #: Rank on this machine.
    local_process_index: int = 0
    #: Number of processes on this machine.
    local_num_processes: int = 1
    because: str = "not started by a launcher"


@dataclass(kw_only=True)
class Process(Topology):
    """Where this process stands among the ranks, what it runs on, and how its group starts."""

    device: torch.device
    #: The ranks' key-value store (`torch.distributed.Store`), None on one process.
    store: Any = None
    #: How long a collective may take; None is torch's default.
    timeout: timedelta | None = None
    #: Communication backend that was asked for, such as gloo; None is torch's for the device.
    comm_backend: str | None = None
    #: Rendezvous URL, in the place of the store.
    init_method: str | None = None


def read_topology(environ: Mapping[str, str]) -> Topology:
    """Read the ranks from the variables of torchrun or an MPI.

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
        because = f"environment variables {rank_name}={rank}, {size_name}={size}"
        local, local_size = said.get(local_name, rank), said.get(local_size_name, size)
        return Topology(rank, size, local, local_size, because)
    return Topology()


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigurationError(
            f"Environment variable {name}={environ[name]!r} must be a number."
        ) from None
