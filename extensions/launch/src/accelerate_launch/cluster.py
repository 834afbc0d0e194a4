"""Detect what started the launcher (mpirun, SLURM, a Kubernetes operator), and read its settings."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_core.plugin import ConfigurationError, SourcedValue
from accelerate_launch import machine_0, mpi, pods, slurm
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
    """Return the mpirun, the SLURM allocation or the pod of a job that this process runs in.

    Raises:
        ConfigurationError: the variables contradict each other.
    """
    if "TORCHELASTIC_RUN_ID" in environ or {"RANK", "LOCAL_RANK"} <= environ.keys():
        return ClusterEnvironment()  # already a rank; `planning` refuses that
    flavour = _flavour(environ)
    if flavour is not None:
        return _mpi(flavour, environ)
    if "SLURM_JOB_ID" in environ:
        return _slurm(environ)
    if pods.in_pod(environ):
        return ClusterEnvironment("Kubernetes", pods.pod_values(environ))
    return ClusterEnvironment()


def slurm_task_ranks(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the rank variables of a script that `srun` started as one of several tasks.

    Each task is one rank, regardless of the number of tasks per node: unlike `launch`, a script cannot
    start more ranks. A batch script and the shell of `salloc` are no tasks.

    Raises:
        ConfigurationError: the nodes have different numbers of tasks, or the first one's name does not
            resolve on this node.
    """
    if slurm.tasks_of_step(environ) == 1 or _flavour(environ) is not None:
        return {}
    ranks = _slurm_rank(environ).ranks
    host, port = ranks["MASTER_ADDR"], int(ranks["MASTER_PORT"])
    if ranks["RANK"] != "0":  # torch would wait for minutes
        named = "MASTER_ADDR" if environ.get("MASTER_ADDR") else "the first node of the SLURM step"
        machine_0.check_resolves(host, port, named)
    return ranks


def mpi_ranks(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse to start MPI ranks on several machines without the address of rank 0.

    The core reads the ranks themselves.

    Raises:
        ConfigurationError: MASTER_ADDR is not set, so each machine would look for rank 0 on itself.
    """
    flavour = _flavour(environ)
    if flavour is None or "MASTER_ADDR" in environ:
        return {}
    _, size_name, _, local_size_name = flavour.ranks
    size, local_size = environ.get(size_name, ""), environ.get(local_size_name, "")
    if size.isdigit() and local_size.isdigit() and int(local_size) < int(size):
        raise ConfigurationError(
            f"The {size} ranks of {flavour.name} are on several machines, but MASTER_ADDR does not say on "
            "which one rank 0 is. Set MASTER_ADDR to its host name for all ranks, or start the script with "
            "the launcher: accelerate-core launch."
        )
    return {}


def pmix_ranks(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Refuse to train alone in one of several processes that PMIx started.

    PMIx has no variable for the number of processes, so they can't be ranks.

    Raises:
        ConfigurationError: contains the command that starts the processes as ranks.
    """
    rank = environ["PMIX_RANK"]
    known = _flavour(environ) is not None or slurm.tasks_of_step(environ) > 1
    if known or not rank.isdigit() or int(rank) == 0:
        return {}
    script = sys.argv if sys.argv and sys.argv[0].endswith(".py") else ["SCRIPT.py"]
    raise ConfigurationError(
        f"This process is one of several (PMIX_RANK={rank}), but RANK and WORLD_SIZE are not set, so each "
        "of them would train a separate model as rank 0 of 1. Start them with the launcher, which sets "
        f"the ranks:\n    mpirun -n NUMBER accelerate-core launch {shlex.join(script)}\n"
        "If each of them should train alone, set RANK=0 and WORLD_SIZE=1."
    )


def _flavour(environ: Mapping[str, str]) -> mpi.Flavour | None:
    """Return the MPI whose mpirun started this process."""
    flavour = mpi.around(environ)
    # `srun --mpi=pmi2` sets the ranks of PMI, but not the local ranks, which only SLURM knows.
    if flavour is not None and slurm.in_step(environ) and flavour.ranks[2] not in environ:
        return None
    return flavour


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
    port = environ.get("MASTER_PORT") or mpi.port_of_run(environ, machines)
    values = {
        "num_processes": SourcedValue(size, origin),
        "launcher": SourcedValue("simple", origin),
    }
    made = _rank(rank, size, local, local_size, address, port)
    return ClusterEnvironment(flavour.name, values, made)


def _slurm(environ: Mapping[str, str]) -> ClusterEnvironment:
    job = environ["SLURM_JOB_ID"]
    step = slurm.in_step(environ)
    tasks, nodes, names = _slurm_size(environ)
    hosts = slurm.expand_nodes(names)
    origin = f"SLURM job {job}"
    if not step and environ.get("SLURM_HET_SIZE", "1") != "1":
        groups = int(environ["SLURM_HET_SIZE"]) - 1
        raise ConfigurationError(
            f"{origin} is heterogeneous (SLURM_HET_SIZE={groups + 1}), so launch cannot start its nodes "
            f"itself. Start one launcher per node: srun --het-group=0-{groups} accelerate-core launch."
        )
    run = _number(environ, "SLURM_STEP_ID") if step else os.getpid()
    if step and tasks > nodes:
        return _slurm_rank(environ)
    values: dict[str, SourcedValue] = {}
    if nodes > 1:
        if not hosts:
            raise ConfigurationError(
                f"{origin} has {nodes} nodes, but SLURM_JOB_NODELIST is not set."
            )
        numbers = "the job and step numbers" if step else "its number and the launcher's process ID"
        port_origin = f"{origin}, from {numbers}"
        values = {
            "num_machines": SourcedValue(nodes, f"{origin}, nodes {names}"),
            "main_process_ip": SourcedValue(hosts[0], f"{origin}, first of {names}"),
            "main_process_port": SourcedValue(slurm.port_of_run(job, run), port_origin),
            "rdzv_id": SourcedValue(f"{job}.{run}", origin),
        }
        if step:
            rank = _number(environ, "SLURM_NODEID")
            values["machine_rank"] = SourcedValue(rank, f"{origin}, SLURM_NODEID")
        else:
            why = f"{origin}: srun starts all of its nodes"
            values["launcher"] = SourcedValue("srun", why)
    return ClusterEnvironment("SLURM", values)


def _slurm_size(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the numbers of tasks and nodes, and the node list, of the step or else of the job."""
    of = "STEP" if slurm.in_step(environ) else "JOB"
    tasks = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes = _first(environ, f"SLURM_{of}_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    names = (f"SLURM_{of}_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    listed = next((environ[name] for name in names if environ.get(name)), "")
    return tasks, nodes, listed


def _slurm_rank(environ: Mapping[str, str]) -> ClusterEnvironment:
    """Return the rank of this task, if each task is one rank."""
    tasks, nodes, names = _slurm_size(environ)
    hosts = slurm.expand_nodes(names)
    origin = f"SLURM job {environ['SLURM_JOB_ID']}"
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    # Without --ntasks-per-node, SLURM fills the first node before it uses the next one.
    uneven = len(set(slurm.expand_counts(listed))) > 1 if listed else tasks % nodes != 0
    if uneven:
        counts = f" ({listed})" if listed else ""
        raise ConfigurationError(
            f"{origin} has {tasks} tasks on {nodes} nodes{counts}, but every node needs the same number. "
            "Set --ntasks-per-node."
        )
    why = f"{origin}: each of {tasks} tasks is a rank (SLURM_PROCID={rank})"
    values = {"num_processes": SourcedValue(tasks, why), "launcher": SourcedValue("simple", why)}
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts and nodes > 1 else LOOPBACK)
    step = _number(environ, "SLURM_STEP_ID")
    port = environ.get("MASTER_PORT") or slurm.port_of_run(environ["SLURM_JOB_ID"], step)
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
