"""Read the variables that Kubernetes' training operators set in the pods of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelerate_core.plugin import ConfigurationError, SourcedValue
from accelerate_launch.plan import DEFAULT_PORT, machine_range

#: The index of a pod in an indexed Job, which JobSet also uses.
INDEX = "JOB_COMPLETION_INDEX"

#: The pods of a job start one after the other, and a pod has no name before it has an address. So
#: machines wait for machine 0 this long, for both rendezvous backends.
PATIENCE = "timeout=900,join_timeout=900"


def in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether an operator numbered this machine, as one of the pods of a job."""
    # Without an address, the pods of an indexed Job are separate runs.
    indexed = INDEX in environ and bool(environ.get("MASTER_ADDR"))
    return bool(environ.get("PET_NNODES")) or indexed


def pod_values(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the options of `launch` that follow from the variables of an operator.

    Kubeflow's TrainJob and PyTorchJob set `PET_NNODES`, `PET_NPROC_PER_NODE` and `PET_NODE_RANK`. The
    address is in `PET_MASTER_ADDR` and `PET_MASTER_PORT` for a TrainJob, in `MASTER_ADDR` and
    `MASTER_PORT` for a PyTorchJob, and in `PET_RDZV_ENDPOINT` for an elastic one. A JobSet or an
    indexed Job sets only `JOB_COMPLETION_INDEX`; its manifest sets `MASTER_ADDR`.

    Raises:
        ConfigurationError: a variable is not a number, or the number of pods may change and no rendezvous
            is set.
    """
    if not environ.get("PET_NNODES"):
        return _address(environ, {"machine_rank": _number(environ, INDEX)})
    machines = SourcedValue(environ["PET_NNODES"], _origin(environ, "PET_NNODES"))
    least, most = machine_range(machines)
    if least < most and not environ.get("PET_RDZV_ENDPOINT"):
        raise ConfigurationError(
            f"Environment variable PET_NNODES={machines.value!r} lets pods leave and join, but "
            "PET_RDZV_ENDPOINT does not say where they meet. The operator of PyTorchJob sets both if "
            "the job has an elasticPolicy. In another job, set one number of pods."
        )
    values = {"num_machines": machines if least < most else SourcedValue(most, machines.origin)}
    processes = _processes(environ, most)
    if processes is not None:
        values["num_processes"] = processes
    if environ.get("PET_MAX_RESTARTS"):
        values["max_restarts"] = _number(environ, "PET_MAX_RESTARTS")
    if most == 1:
        return values
    if environ.get("PET_RDZV_ENDPOINT"):
        return {**values, **_elastic(environ)}
    values["machine_rank"] = _number(environ, "PET_NODE_RANK")
    return _address(environ, values)


def _address(
    environ: Mapping[str, str], values: dict[str, SourcedValue]
) -> dict[str, SourcedValue]:
    """Add the address of machine 0, and how long to wait for it."""
    for option, names in (
        ("main_process_ip", ("PET_MASTER_ADDR", "MASTER_ADDR")),
        ("main_process_port", ("PET_MASTER_PORT", "MASTER_PORT")),
    ):
        name = next((name for name in names if environ.get(name)), None)
        if name is not None:
            number = option.endswith("port")
            values[option] = _number(environ, name) if number else _text(environ, name)
    values["rdzv_conf"] = SourcedValue(PATIENCE, "the pods of a job start one after the other")
    return values


def _elastic(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the rendezvous of a PyTorchJob with an `elasticPolicy`, which numbers the pods itself."""
    origin = _origin(environ, "PET_RDZV_ENDPOINT")
    host, _, port = environ["PET_RDZV_ENDPOINT"].rpartition(":")
    conf = environ.get("PET_RDZV_CONF") or PATIENCE
    values = {
        "rdzv_backend": SourcedValue(environ.get("PET_RDZV_BACKEND") or "c10d", origin),
        "main_process_ip": SourcedValue(host or environ["PET_RDZV_ENDPOINT"], origin),
        "main_process_port": SourcedValue(int(port) if port.isdigit() else DEFAULT_PORT, origin),
        "rdzv_conf": SourcedValue(conf, origin),
    }
    if environ.get("PET_RDZV_ID"):
        values["rdzv_id"] = _text(environ, "PET_RDZV_ID")
    return values


def _processes(environ: Mapping[str, str], machines: int) -> SourcedValue | None:
    """Return the number of processes; None lets the launcher count the accelerators of this pod."""
    # The operator of PyTorchJob uses the second name for an elastic job.
    for name in ("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE"):
        text = environ.get(name, "")
        if not text or text in ("auto", "gpu"):
            continue
        if text == "cpu":
            count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        else:
            count = _number(environ, name).value
        return SourcedValue(count * machines, _origin(environ, name))
    return None


def _origin(environ: Mapping[str, str], name: str) -> str:
    return f"environment variable {name}={environ[name]}"


def _text(environ: Mapping[str, str], name: str) -> SourcedValue:
    return SourcedValue(environ[name], _origin(environ, name))


def _number(environ: Mapping[str, str], name: str) -> SourcedValue:
    text = environ.get(name, "")
    if not text.isdigit():
        raise ConfigurationError(f"Environment variable {name}={text!r} must be a number.")
    return SourcedValue(int(text), _origin(environ, name))
