"""Settings of the launcher `kubernetes`."""

from __future__ import annotations

from accelerate_core.plugin import option, settings

#: The kinds of jobs, the default first.
KINDS = ("jobset", "trainjob", "pytorchjob", "job")


@settings(env_prefix="ACCELERATE_KUBERNETES_", section="kubernetes_config")
class KubernetesLaunch:
    """The job that the launcher `kubernetes` submits, and the pods of the job."""

    kind: str = option(
        default=KINDS[0],
        help="kind of job: jobset, trainjob (Kubeflow Trainer), pytorchjob (Kubeflow Training Operator), "
        "or job, which needs no operator",
        choices=KINDS,
        ask="Which kind of job?",
    )
    image: str | None = option(
        default=None,
        help="container image with the script and accelerate-core",
        ask="Container image with your script and accelerate-core?",
    )
    name: str | None = option(default=None, help="name of the job; default: from the script")
    namespace: str | None = option(
        default=None,
        help="namespace of the job; default: the one of the kubectl context",
        ask="Namespace (empty: the one of the kubectl context)?",
    )
    context: str | None = option(default=None, help="kubectl context; default: the current one")
    output: str | None = option(
        default=None, help="write the job to this file instead of submitting it"
    )
    resources: list[str] | None = option(
        default=None,
        help="resource of each pod, such as nvidia.com/gpu=8 or memory=64Gi (repeatable)",
        ask="Resources of each pod, such as nvidia.com/gpu=8, cpu=16, memory=64Gi?",
    )
    node_selector: list[str] | None = option(
        default=None, help="label of the nodes to use, as KEY=VALUE (repeatable)"
    )
    tolerations: list[str] | None = option(
        default=None,
        help="taint to tolerate: KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT (repeatable)",
    )
    shm_size: str | None = option(
        default=None,
        help="size of /dev/shm, such as 16Gi, or none for the container runtime's 64 MB; "
        "default: as much as the pod's memory",
    )
    env: list[str] | None = option(
        default=None,
        help="environment variable, as NAME=VALUE, or NAME to copy it from here (repeatable)",
    )
    secrets: list[str] | None = option(
        default=None,
        help="secret whose keys become variables, or VARIABLE=SECRET/KEY for one key (repeatable)",
    )
    pull_secrets: list[str] | None = option(
        default=None, help="secret for pulling the image (repeatable)"
    )
    volumes: list[str] | None = option(
        default=None,
        help="persistent volume claim to mount, as CLAIM:PATH or CLAIM:PATH:ro (repeatable)",
        ask="Persistent volume claims for checkpoints and data, as CLAIM:PATH?",
    )
    working_dir: str | None = option(
        default=None, help="working directory in the container; default: the image's"
    )
    service_account: str | None = option(default=None, help="service account of the pods")
    priority_class: str | None = option(default=None, help="priority class of the pods")
    queue: str | None = option(default=None, help="Kueue's local queue")
    restarts: int = option(
        default=0,
        help="how often to start all pods again after a failure",
        ge=0,
        ask="How often to start all pods again after a failure?",
    )
    grace_period: int | None = option(
        default=None,
        help="seconds from SIGTERM to SIGKILL; default: 300 if preemption_signals has SIGTERM, else "
        "the cluster's",
        ge=1,
    )
