"""Detect an mpirun or a SLURM allocation around the launcher, and read its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_core.config.provenance import SourcedValue
from accelerate_core.errors import ConfigurationError
from accelerate_launch import mpi, slurm
from accelerate_launch.plan import LOOPBACK


@dataclass(frozen=True)
class ClusterEnvironment:
    """The settings that a scheduler or mpirun has already made.

    Attributes:
        values: the options of `launch` that follow from them.
        ranks: the rank variables of this process; empty if this process starts the ranks.
    """

    name: str = ""
    values: Mapping[str, SourcedValue] = field(default_factory=dict)
    ranks: Mapping[str, str] = field(default_factory=dict)


def detect_cluster(environ: Mapping[str, str]) -> ClusterEnvironment:
    """Return the mpirun or the SLURM allocation that this process runs in.

    Raises:
        ConfigurationError: the variables contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "LOCAL_RANK"} <= environ.keys():
        return ClusterEnvironment()  # already a rank; `planning` refuses that
    flavour = mpi.around(environ)
    if flavour is not None:
        return _mpi(flavour, environ)
    if "SLURM_JOB_ID" in environ:
        return _slurm(environ)
    return ClusterEnvironment()


def _mpi(flavour: mpi.Flavour, environ: Mapping[str, str]) -> ClusterEnvironment:
    rank, size, local, local_size = (_number(environ, name) for name in flavour.ranks)
    origin = f"{flavour.name} ({flavour.ranks[0]}={rank}, {flavour.ranks[1]}={size})"
    machines = max(1, size // max(1, local_size))
    if machines > 1 and "MASTER_ADDR" not in environ:
        raise ConfigurationError(
            f"{origin} started {size} ranks on {machines} machines, but the address of rank 0 is "
            "unknown. Set MASTER_ADDR to the address of the first host and pass it on with mpirun -x "
            "MASTER_ADDR (Open MPI) or -genv MASTER_ADDR (others). Or let launch start mpirun: "
            "--mpirun_hostfile FILE."
        )
    address = environ.get("MASTER_ADDR", LOOPBACK)
    port = environ.get("MASTER_PORT", mpi.port_of_run(environ))
    values = {
        "num_processes": SourcedValue(size, origin),
        "launcher": SourcedValue("simple", origin),
    }
    made = _rank(rank, size, local, local_size, address, port)
    return ClusterEnvironment(flavour.name, values, made)


def _slurm(environ: Mapping[str, str]) -> ClusterEnvironment:
    job = environ["SLURM_JOB_ID"]
    step = slurm.in_step(environ)
    of = "STEP" if step else "JOB"
    nodes = _first(environ, f"SLURM_{of}_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    names = environ.get(f"SLURM_{of}_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    hosts = slurm.expand_nodes(names or environ.get("SLURM_NODELIST", ""))
    origin = f"SLURM job {job}"
    if step:
        tasks = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        if tasks > nodes:
            return _slurm_rank(environ, tasks, nodes, hosts, origin)
    values: dict[str, SourcedValue] = {}
    if nodes > 1:
        if not hosts:
            raise ConfigurationError(
                f"{origin} has {nodes} nodes, but SLURM_JOB_NODELIST is not set."
            )
        values = {
            "num_machines": SourcedValue(nodes, f"{origin}, nodes {names}"),
            "main_process_ip": SourcedValue(hosts[0], f"{origin}, first of {names}"),
            "main_process_port": SourcedValue(slurm.port_of_job(job), f"{origin}, from its number"),
            "rdzv_id": SourcedValue(job, origin),
        }
        if step:
            rank = _number(environ, "SLURM_NODEID")
            values["machine_rank"] = SourcedValue(rank, f"{origin}, SLURM_NODEID")
        else:
            why = f"{origin}: srun starts all of its nodes"
            values["launcher"] = SourcedValue("srun", why)
    return ClusterEnvironment("SLURM", values)


def _slurm_rank(
    environ: Mapping[str, str], tasks: int, nodes: int, hosts: list[str], origin: str
) -> ClusterEnvironment:
    """Return the rank of this task: with several tasks per node, each task is one rank."""
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    if tasks % nodes:
        raise ConfigurationError(
            f"{origin} has {tasks} tasks on {nodes} nodes, but every node needs the same number. Set "
            "--ntasks-per-node."
        )
    why = f"{origin}: each of {tasks} tasks is a rank (SLURM_PROCID={rank})"
    values = {"num_processes": SourcedValue(tasks, why), "launcher": SourcedValue("simple", why)}
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts and nodes > 1 else LOOPBACK)
    port = environ.get("MASTER_PORT") or slurm.port_of_job(environ["SLURM_JOB_ID"])
    made = _rank(rank, tasks, local, tasks // nodes, address, port)
    return ClusterEnvironment("SLURM", values, made)


def _rank(*values: object) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, values), strict=True))


def _first(environ: Mapping[str, str], *names: str) -> int:
    return next((_number(environ, name) for name in names if environ.get(name)), 1)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise ConfigurationError(f"Environment variable {name}={text!r} must be a number.")
    return int(text)
