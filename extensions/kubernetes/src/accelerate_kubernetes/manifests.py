"""The Kubernetes objects of a job. The job itself is the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate_kubernetes.job import Job
from accelerate_kubernetes.pod import INSTANCE, config_name, labels, pod_template
from accelerate_launch import PREEMPTED

Manifest = dict[str, Any]


def manifests(job: Job) -> list[Manifest]:
    """Return the objects of a job, in the order in which they must be created."""
    made = [_config_map(job)] if job.config else []
    return [*made, *_KINDS[job.kind](job)]


def _metadata(job: Job, name: str | None = None, **more: str) -> Manifest:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name or job.name, **namespace, "labels": {**labels(job), **more}}


def _job_metadata(job: Job) -> Manifest:
    return _metadata(job, **({"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}))


def _config_map(job: Job) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, config_name(job)),
        "data": {"config.yaml": job.config},
    }


def _jobset(job: Job) -> list[Manifest]:
    workers = "workers"
    # JobSet names the first pod SET-REPLICATEDJOB-0-0, in a service that has the name of the set.
    first = f"{job.name}-{workers}-0-0.{job.name}" if job.machines > 1 else None
    size = {"parallelism": job.machines, "completions": job.machines, "completionMode": "Indexed"}
    template = pod_template(job, "trainer", address=first)
    spec = {**size, **_all_or_none("trainer"), "template": template}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _job_metadata(job),
            "spec": _jobset_spec(job, {"name": workers, "replicas": 1, "template": {"spec": spec}}),
        }
    ]


def _jobset_spec(job: Job, replicated: Manifest) -> Manifest:
    """Return the part of a JobSet that a TrainingRuntime also has."""
    # A preempted run has saved, so starting it again does not count as one of the restarts.
    again = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        # Pods look for machine 0 while it is still starting.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [again]},
        "replicatedJobs": [replicated],
    }


def _all_or_none(container: str) -> Manifest:
    """Return the fields of a Job that fails as a whole, with a reason that says if it was preempted."""
    preempted = {"containerName": container, "operator": "In", "values": [PREEMPTED]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": preempted},
                {"action": "FailJob", "onPodConditions": [disrupted]},
            ]
        },
    }


def _trainjob(job: Job) -> list[Manifest]:
    # The operator looks for these names and for this label.
    node = "node"
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    api = "trainer.kubeflow.org"
    replicated = {
        "name": node,
        "template": {
            "metadata": {"labels": step},
            "spec": {**_all_or_none(node), "template": pod_template(job, node)},
        },
    }
    runtime = {
        "apiVersion": f"{api}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, **{f"{api}/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": job.machines, "torch": {}},
            "template": {"spec": _jobset_spec(job, replicated)},
        },
    }
    train = {
        "apiVersion": f"{api}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _job_metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": api, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": job.machines, "numProcPerNode": job.per_machine},
        },
    }
    return [runtime, train]


def _pytorchjob(job: Job) -> list[Manifest]:
    # The operator looks for this container and this port, and sets the pods' restart policy.
    template = pod_template(job, "pytorch", restart_policy=None, port_name="pytorchjob-port")
    policy = "OnFailure" if job.restarts else "Never"
    replicas = {"Master": {"replicas": 1, "restartPolicy": policy, "template": template}}
    if job.machines > 1:
        workers = job.machines - 1
        replicas["Worker"] = {"replicas": workers, "restartPolicy": policy, "template": template}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _job_metadata(job),
            "spec": {
                "nprocPerNode": str(job.per_machine),
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.restarts},
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def _job(job: Job) -> list[Manifest]:
    """Return an indexed Job, which needs no operator, and the service that names its pods."""
    several = job.machines > 1
    template = pod_template(job, "trainer", address=f"{job.name}-0.{job.name}" if several else None)
    if several:
        template["spec"] = {"subdomain": job.name, **template["spec"]}
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _job_metadata(job),
        "spec": {
            "completionMode": "Indexed",
            "parallelism": job.machines,
            "completions": job.machines,
            "backoffLimit": 0,
            "template": template,
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: job.name},
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }
    return [service, indexed] if several else [indexed]


_KINDS: dict[str, Callable[[Job], list[Manifest]]] = {
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
    "job": _job,
}
