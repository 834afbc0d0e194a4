"""Detect that an mpirun started this process, or start the ranks with mpirun."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate_core.plugin import ConfigurationError
from accelerate_launch.plan import DEFAULT_PORT, LOOPBACK, LaunchPlan
from accelerate_launch.simple import target_command

#: A line of a host file: `HOST`, `HOST:N` or `HOST slots=N`.
_HOST = re.compile(r"(?P<host>[^\s:]+)(?::(?P<count>\d+))?(?:.*\bslots\s*=\s*(?P<slots>\d+))?")

#: The launcher's environment variables that are passed on to ranks on other hosts.
_CARRIED = ("ACCELERATE_", "MASTER_", "OMP_NUM_THREADS", "PARALLELISM_CONFIG_", "GLOO_")


@dataclass(frozen=True)
class Flavour:
    """One MPI: its variables for the ranks, and the options of its mpirun.

    Attributes:
        ranks: the variables for rank, size, local rank and local size.
        marks: texts in the output of `mpirun --version`, of which one must be present.
        foreign: matches lines of host files in the format of other MPIs.
        sets: the beginning of variables that only this MPI sets.
    """

    name: str
    ranks: tuple[str, str, str, str]
    marks: tuple[str, ...]
    hostfile: str = "-f"
    hosts: str = "-hosts"
    foreign: str = r".*\bslots\s*="
    per_host: str = "-ppn"
    export: str = "-genv"
    more: tuple[str, ...] = ()
    sets: str = ""


def _ompi(name: str) -> str:
    return f"OMPI_COMM_WORLD_{name}"


#: The variables of Hydra, the process manager of MPICH and of MPIs derived from it.
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

#: In the order in which their variables are tried. `marks` are found in `mpirun --version`.
FLAVOURS = (
    Flavour(
        "Open MPI",
        (_ompi("RANK"), _ompi("SIZE"), _ompi("LOCAL_RANK"), _ompi("LOCAL_SIZE")),
        ("Open MPI", "OpenRTE", "Open RTE"),
        hostfile="--hostfile",
        hosts="--host",
        foreign=r"[^\s:]+:\d+(\s|$)",
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
    Flavour("Intel MPI", _HYDRA, ("Intel(R) MPI",), sets="I_MPI_"),
    Flavour("MPICH", _HYDRA, ("MPICH", "HYDRA")),
)


def around(environ: Mapping[str, str]) -> Flavour | None:
    """Return the MPI that started this process as one of several, or None."""
    for flavour in FLAVOURS:
        rank, size, _, _ = flavour.ranks
        started = rank in environ and environ.get(size, "1") != "1"
        if started and any(name.startswith(flavour.sets) for name in environ):
            return flavour
    return None


def port_of_run(environ: Mapping[str, str], machines: int) -> int:
    """Return a port that is the same on all ranks of one mpirun and rarely the same for two runs."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "SLURM_JOB_ID")
    text = next((environ[name] for name in names if environ.get(name)), "")
    if not text and machines == 1:  # MPICH has no such variable
        text = str(_hydra_above(os.getpid()))
    return 20000 + int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 20000


def _hydra_above(process: int) -> int:
    """Return the ID of the Hydra process that started the ranks of this machine, 0 if unknown."""
    while process > 1:
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        except OSError:  # not Linux
            return 0
        found = re.search(r"^Name:\t(.*)$(?:.*\n)*?^PPid:\t(\d+)$", status, re.MULTILINE)
        if found is None:
            return 0
        if found[1].startswith("hydra_"):
            return process
        process = int(found[2])
    return 0


def hosts_of(file: str) -> list[str]:
    """Return the hosts in a host file, in order.

    Raises:
        ConfigurationError: the file can't be read, or names no host.
    """
    hosts = list(dict.fromkeys(_read_host(line)[0] for line in _host_lines(file)))
    if not hosts:
        raise ConfigurationError(f"The host file {file} names no host.")
    return hosts


def _host_lines(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read the host file {file}: {error}.") from None
    return [text for line in lines if (text := line.split("#")[0].strip())]


def _read_host(line: str) -> tuple[str, int]:
    """Return the host and the number of processes in a line of a host file."""
    found = _HOST.match(line)
    if found is None:
        return line, 1
    return found["host"], int(found["slots"] or found["count"] or 1)


def host_options(file: str, flavour: Flavour) -> list[str]:
    """Return the options that give mpirun the hosts of a file.

    Open MPI reads `HOST slots=N`, the others `HOST:N`. A file in the format of another MPI is passed as
    a list of hosts.
    """
    lines = _host_lines(file)
    if not any(re.match(flavour.foreign, line) for line in lines):
        return [flavour.hostfile, file]
    counts: dict[str, int] = {}
    for host, slots in map(_read_host, lines):
        counts[host] = counts.get(host, 0) + slots
    return [flavour.hosts, ",".join(f"{host}:{count}" for host, count in counts.items())]


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
            command += host_options(plan.mpirun_hostfile, flavour)
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
            "Neither mpirun nor mpiexec was found on this machine. Install Open MPI, MPICH, Intel "
            "MPI or MVAPICH, or leave out --launcher mpirun and --mpirun_hostfile."
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
        f"{program} is not supported ({first[0] if first else 'it prints no version'}). launch supports "
        f"{', '.join(flavour.name for flavour in FLAVOURS)}. Start it yourself: mpirun -n N "
        f"{sys.executable} SCRIPT."
    )
