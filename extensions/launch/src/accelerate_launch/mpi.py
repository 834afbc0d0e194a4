"""Detect that an mpirun started this process, or start the ranks with mpirun."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate_core.errors import ConfigurationError
from accelerate_launch.plan import DEFAULT_PORT, LOOPBACK, LaunchPlan
from accelerate_launch.simple import target_command

#: The launcher's environment variables that are passed on to ranks on other hosts.
_CARRIED = ("ACCELERATE_", "MASTER_", "OMP_NUM_THREADS", "PARALLELISM_CONFIG_", "GLOO_")


@dataclass(frozen=True)
class Flavour:
    """The options of one MPI, and its variables for (rank, size, local rank, local size)."""

    name: str
    ranks: tuple[str, str, str, str]
    marks: tuple[str, ...]
    hostfile: str = "-f"
    per_host: str = "-ppn"
    export: str = "-genv"
    more: tuple[str, ...] = ()


def _ompi(name: str) -> str:
    return f"OMPI_COMM_WORLD_{name}"


#: In the order in which their variables are tried. `marks` are found in `mpirun --version`.
FLAVOURS = (
    Flavour(
        "Open MPI",
        (_ompi("RANK"), _ompi("SIZE"), _ompi("LOCAL_RANK"), _ompi("LOCAL_SIZE")),
        ("Open MPI", "OpenRTE", "Open RTE"),
        hostfile="--hostfile",
        per_host="--npernode",
        export="-x",
        more=("--bind-to", "none"),
    ),
    Flavour(
        "MVAPICH",
        (
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
        ("MVAPICH",),
    ),
    Flavour(
        "Intel MPI",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("Intel(R) MPI", "HYDRA", "MPICH"),
    ),
)


def around(environ: Mapping[str, str]) -> Flavour | None:
    """Return the MPI that started this process as one of several, None if there is none."""
    for flavour in FLAVOURS:
        rank, size, _, _ = flavour.ranks
        if rank in environ and environ.get(size, "1") != "1":
            return flavour
    return None


def port_of_run(environ: Mapping[str, str]) -> int:
    """Return a port that is the same on all ranks of one mpirun and rarely the same for two runs."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_PORT", "PMI_ID", "HYDI_CONTROL_FD")
    text = next((environ[name] for name in names if environ.get(name)), "")
    return 20000 + int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 20000


def hosts_of(file: str) -> list[str]:
    """Return the hosts in a host file, in order.

    Raises:
        ConfigurationError: the file can't be read, or names no host.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read the host file {file}: {error}.") from None
    words = [line.split("#")[0].split() for line in lines]
    hosts = list(dict.fromkeys(parts[0].split(":")[0] for parts in words if parts))
    if not hosts:
        raise ConfigurationError(f"The host file {file} names no host.")
    return hosts


class MpirunLauncher:
    """Starts the ranks with mpirun, on this machine or on the hosts in a file."""

    name = "mpirun"
    api_version = (1, 0)
    priority = 40

    def accepts(self, plan: LaunchPlan) -> bool:
        """Whether this launcher can start the plan."""
        return plan.mpirun_hostfile is not None or plan.launcher == self.name

    def launch_command(self, plan: LaunchPlan) -> list[str]:
        """Return the command that starts the plan on all hosts.

        Raises:
            ConfigurationError: there is no mpirun, or its MPI is not supported.
        """
        program, flavour = _installed()
        command = [program, "-n", str(plan.num_processes)]
        if plan.mpirun_hostfile is not None:
            command += [flavour.hostfile, plan.mpirun_hostfile]
            command += [flavour.per_host, str(plan.processes_per_machine)]
        command += flavour.more
        # mpirun passes only the variables on its command line to other hosts.
        for name, value in sorted({**plan.environment, **self.launch_environment(plan)}.items()):
            if name.startswith(_CARRIED):
                command += ["-x", name] if flavour.export == "-x" else ["-genv", name, value]
        return [*command, *target_command(plan.target)]

    def launch_environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the address at which the ranks connect to rank 0."""
        port = plan.main_process_port or DEFAULT_PORT
        return {"MASTER_ADDR": plan.main_process_ip or LOOPBACK, "MASTER_PORT": str(port)}


def _installed() -> tuple[str, Flavour]:
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigurationError(
            "Neither mpirun nor mpiexec was found on this machine. Install Open MPI, Intel MPI or "
            "MVAPICH, or leave out --launcher mpirun and --mpirun_hostfile."
        )
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    for flavour in FLAVOURS:
        if any(mark in said for mark in flavour.marks):
            return program, flavour
    first = said.strip().splitlines()[:1]
    raise ConfigurationError(
        f"{program} is not supported ({first[0] if first else 'it prints no version'}). Supported are "
        f"{', '.join(flavour.name for flavour in FLAVOURS)}. Start it yourself: mpirun -n N "
        f"{sys.executable} SCRIPT."
    )
