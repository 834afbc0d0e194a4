"""What the operators do with a job: the pods that they create, and the variables that they set.

The names and values come from the operators' sources: `pkg/runtime/framework/plugins/torch/torch.go`
of Kubeflow Trainer 2, `pkg/controller.v1/pytorch/envvar.go` of the Training Operator 1.9, and
Kubernetes' indexed Jobs, which JobSet also creates.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import clean_environment
from warm_python import warm_python

#: Set in every container of a cluster.
CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
#: The port that Kubeflow Trainer uses.
TRAINER_PORT = "29400"


@dataclass
class Pod:
    """A pod as its node starts it."""

    command: list[str]
    environment: dict[str, str]
    spec: dict[str, Any]


def pods_of(documents: list[dict[str, Any]]) -> list[Pod]:
    """Return the pods of a job, in the order of their index."""
    *_, job = documents
    return {"JobSet": _jobset, "TrainJob": _trainjob, "PyTorchJob": _pytorchjob, "Job": _job}[
        job["kind"]
    ](documents)


def _jobset(documents: list[dict[str, Any]]) -> list[Pod]:
    (replicated,) = documents[-1]["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return _indexed(replicated["template"]["spec"])


def _job(documents: list[dict[str, Any]]) -> list[Pod]:
    return _indexed(documents[-1]["spec"])


def _indexed(spec: dict[str, Any]) -> list[Pod]:
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    return [
        _pod(spec["template"]["spec"], {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]


def _trainjob(documents: list[dict[str, Any]]) -> list[Pod]:
    *_, runtime, train = documents
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer, name = train["spec"]["trainer"], train["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    spec = node["template"]["spec"]["template"]["spec"]
    # The operator sets its variables in this container of this job only.
    assert (node["name"], step, spec["containers"][0]["name"]) == ("node", "trainer", "node")
    return [
        _pod(
            spec,
            {
                "JOB_COMPLETION_INDEX": str(index),
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                "PET_MASTER_PORT": TRAINER_PORT,
            },
        )
        for index in range(trainer["numNodes"])
    ]


def _pytorchjob(documents: list[dict[str, Any]]) -> list[Pod]:
    job = documents[-1]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    master = replicas["Master"]["template"]["spec"]["containers"][0]
    assert master["name"] == "pytorch"
    ports = [one["containerPort"] for one in master.get("ports", ())]
    per_pod, total = int(job["spec"]["nprocPerNode"]), sum(r["replicas"] for r in replicas.values())
    made = []
    for kind, first in (("Master", 0), ("Worker", 1)):
        for index in range(replicas.get(kind, {"replicas": 0})["replicas"]):
            rank = str(first + index)
            variables = {
                "PYTHONUNBUFFERED": "0",
                "MASTER_PORT": str(ports[0]) if ports else "23456",
                "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
                "WORLD_SIZE": str(total * per_pod),
                "RANK": rank,
                "PET_NPROC_PER_NODE": str(per_pod),
                "PET_NODE_RANK": rank,
                "PET_NNODES": str(total),
            }
            made.append(_pod(replicas[kind]["template"]["spec"], variables))
    return made


def _pod(spec: dict[str, Any], variables: dict[str, str]) -> Pod:
    (container,) = spec["containers"]
    own = {one["name"]: one.get("value", "(secret)") for one in container.get("env", ())}
    values = {name: text.replace("$$(", "$(") for name, text in {**own, **variables}.items()}
    command = [word.replace("$$(", "$(") for word in container["command"]]
    return Pod(command, {**CLUSTER, **values}, spec)


def start_here(
    pod: Pod, folder: Path, documents: list[dict[str, Any]], port: int
) -> subprocess.Popen[str]:
    """Start a pod's container as a process of this machine, which has all addresses and files."""
    environment = dict(pod.environment)
    for name in ("MASTER", "PET_MASTER"):
        if f"{name}_ADDR" in environment:
            environment |= {f"{name}_ADDR": "127.0.0.1", f"{name}_PORT": str(port)}
    if "ACCELERATE_CONFIG_FILE" in environment:
        (config,) = (one for one in documents if one["kind"] == "ConfigMap")
        path = folder / "mounted.yaml"
        path.write_text(config["data"]["config.yaml"])
        environment["ACCELERATE_CONFIG_FILE"] = str(path)
    program, *words = pod.command
    assert program == "accelerate-core"
    return subprocess.Popen(
        [str(warm_python()), "-m", "accelerate_core.cli", *words],
        cwd=folder,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
