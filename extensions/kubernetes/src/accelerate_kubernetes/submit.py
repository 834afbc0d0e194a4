"""Submit a job with kubectl, or write it to a file. Run as `python -m accelerate_kubernetes.submit`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from accelerate_kubernetes.pod import INSTANCE

#: Kind -> the resource as kubectl names it.
_RESOURCES = {
    "JobSet": "jobsets.jobset.x-k8s.io",
    "TrainJob": "trainjobs.trainer.kubeflow.org",
    "PyTorchJob": "pytorchjobs.kubeflow.org",
    "Job": "jobs.batch",
}
#: What the objects that a job needs are called, for the hint that deletes them.
_MORE = {
    "ConfigMap": "configmap",
    "Service": "service",
    "TrainingRuntime": "trainingruntimes.trainer.kubeflow.org",
}


def main(arguments: Sequence[str]) -> int:
    """Submit or write the manifests in the last argument, and return the exit status."""
    parser = argparse.ArgumentParser(prog="accelerate_kubernetes.submit")
    parser.add_argument("--context")
    parser.add_argument("--output")
    parser.add_argument("manifests")
    given = parser.parse_args(arguments)
    if given.output is not None:
        return _write(Path(given.output), given.manifests)
    return _submit(_Kubectl(given.context), list(yaml.safe_load_all(given.manifests)))


def _write(path: Path, text: str) -> int:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return _fail(f"Cannot write {path}: {error.strerror}.")
    sys.stdout.write(f"Written: {path}\nSubmit it with: kubectl apply -f {path}\n")
    return 0


class _Kubectl:
    """Runs kubectl in one context."""

    def __init__(self, context: str | None) -> None:
        self.words = ["kubectl", *(["--context", context] if context else [])]

    def __call__(
        self, *words: str, documents: Sequence[Any] = ()
    ) -> subprocess.CompletedProcess[str]:
        text = yaml.safe_dump_all(documents) if documents else None
        return subprocess.run(
            [*self.words, *words], input=text, capture_output=True, text=True, check=False
        )


def _submit(kubectl: _Kubectl, documents: list[Any]) -> int:
    *needed, job = documents
    if kubectl.words == ["kubectl"] and kubectl("config", "current-context").returncode:
        return _fail(
            "kubectl has no current context, so there is no cluster to submit the job to. Choose one "
            "with --kubernetes_context NAME (kubectl config get-contexts lists them), or write the "
            "job to a file with --kubernetes_output job.yaml."
        )
    name, resource = job["metadata"]["name"], _RESOURCES[job["kind"]]
    namespace = job["metadata"].get("namespace")
    place = ["--namespace", namespace] if namespace else []
    # Before anything changes: a job of this name may still be using the objects below.
    found = kubectl("get", resource, name, *place, "--ignore-not-found", "--output", "name")
    if found.returncode:
        return _failed(found, job["kind"])
    hint = _delete_hint(kubectl, resource, name, place, needed)
    if found.stdout.strip():
        return _fail(
            f"The cluster already has the {job['kind']} {name!r}. Choose another name with "
            f"--kubernetes_name, or delete it: {hint}"
        )
    steps = [("apply", needed)] if needed else []
    for verb, objects in [*steps, ("create", [job])]:
        done = kubectl(verb, "--filename", "-", documents=objects)
        sys.stdout.write(done.stdout)
        if done.returncode:
            return _failed(done, job["kind"])
    logs = [*kubectl.words, "logs", "--follow", "--prefix", "--selector", f"{INSTANCE}={name}"]
    sys.stdout.write(f"Follow the output: {' '.join([*logs, *place])}\nDelete the job: {hint}\n")
    return 0


def _delete_hint(
    kubectl: _Kubectl, resource: str, name: str, place: Sequence[str], needed: Sequence[Any]
) -> str:
    kinds = ",".join([resource, *(_MORE[one["kind"]] for one in needed)])
    return " ".join([*kubectl.words, "delete", kinds, "--selector", f"{INSTANCE}={name}", *place])


def _failed(done: subprocess.CompletedProcess[str], kind: str) -> int:
    sys.stderr.write(done.stderr)
    if "doesn't have a resource type" in done.stderr or "no matches for kind" in done.stderr:
        return _fail(
            f"The cluster has no {kind}. Ask its administrator to install the operator, or use "
            "--kubernetes_kind job, which needs none."
        )
    return done.returncode


def _fail(text: str) -> int:
    sys.stderr.write(f"Error: {text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
