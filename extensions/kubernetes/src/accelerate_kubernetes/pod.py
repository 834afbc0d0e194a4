"""The pods of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from accelerate_kubernetes.job import CONFIG_FILE, Job

#: The label that all objects and pods of a job have.
INSTANCE = "app.kubernetes.io/instance"


def labels(job: Job) -> dict[str, str]:
    """Return the labels of all objects and pods of a job."""
    return {INSTANCE: job.name, "app.kubernetes.io/managed-by": "accelerate-core"}


def pod_template(
    job: Job,
    container: str,
    *,
    restart_policy: str | None = "Never",
    address: str | None = None,
    port_name: str = "rendezvous",
) -> dict[str, Any]:
    """Return the template of a job's pods.

    Args:
        container: name of the container; some operators look for a certain one.
        restart_policy: None if the operator sets it.
        address: the host name of machine 0, if the operator does not set it itself.
        port_name: name of machine 0's port; some operators look for a certain one.
    """
    volumes, mounts = _volumes(job)
    port = {"name": port_name, "containerPort": job.port, "protocol": "TCP"}
    main = _without_empty(
        {
            "name": container,
            "image": job.image,
            "command": [_literal(word) for word in job.command],
            "workingDir": job.working_dir,
            "env": _variables(job, address),
            "envFrom": [{"secretRef": {"name": name}} for name in job.secrets],
            "ports": [port] if job.machines > 1 else [],
            "resources": _resources(job.resources),
            "volumeMounts": mounts,
        }
    )
    spec = _without_empty(
        {
            "restartPolicy": restart_policy,
            "terminationGracePeriodSeconds": job.grace_period,
            "serviceAccountName": job.service_account,
            "priorityClassName": job.priority_class,
            "imagePullSecrets": [{"name": name} for name in job.pull_secrets],
            "nodeSelector": dict(job.node_selector),
            "tolerations": [dict(one) for one in job.tolerations],
            "containers": [main],
            "volumes": volumes,
        }
    )
    return {"metadata": {"labels": labels(job)}, "spec": spec}


def config_name(job: Job) -> str:
    """Return the name of the ConfigMap with the job's config file."""
    return f"{job.name}-config"


def _variables(job: Job, address: str | None) -> list[dict[str, Any]]:
    plain = {name: _literal(text) for name, text in job.environment.items()}
    if address is not None:
        plain |= {"MASTER_ADDR": address, "MASTER_PORT": str(job.port)}
    made: list[dict[str, Any]] = [{"name": name, "value": text} for name, text in plain.items()]
    for name, (secret, key) in job.secret_variables.items():
        made.append(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}},
        )
    return made


def _literal(text: str) -> str:
    """Escape what Kubernetes would replace by the value of a variable."""
    return text.replace("$(", "$$(")


def _resources(resources: Mapping[str, str]) -> dict[str, Any]:
    # Equal requests and limits: nodes end pods that use more than they requested first.
    return {"requests": dict(resources), "limits": dict(resources)} if resources else {}


def _volumes(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and where its container has them."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if job.shm_size is not None:
        # The 64 MB of a container are too small for data loader workers and NCCL.
        limit = {"sizeLimit": job.shm_size} if job.shm_size else {}
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **limit}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    for number, (claim, path, read_only) in enumerate(job.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append(
            {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
        )
    if job.config:
        volumes.append({"name": "config", "configMap": {"name": config_name(job)}})
        folder = str(PurePosixPath(CONFIG_FILE).parent)
        mounts.append({"name": "config", "mountPath": folder, "readOnly": True})
    return volumes, mounts


def _without_empty(made: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in made.items() if value not in (None, [], {})}
