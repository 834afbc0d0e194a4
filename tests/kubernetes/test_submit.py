"""The real kubectl submits the job to a stand-in for a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from api_server import RESOURCES, api_server
from launched import run_cli

LAUNCH = ("launch", "--launcher", "kubernetes", "--kubernetes_image", "registry.example/train:1")

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)


def launch(
    folder: Path, kubeconfig: str, *options: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Launch `train.py`, which need not exist here."""
    environ = {"KUBECONFIG": kubeconfig, "PATH": path or os.environ["PATH"]}
    environ["HOME"] = str(folder)  # kubectl caches there what a server offers
    return run_cli(*LAUNCH, *options, "train.py", cwd=folder, env=environ, forked=True)


@needs_kubectl
@pytest.mark.parametrize(
    ("kind", "created"),
    [
        ("jobset", ["ConfigMap", "JobSet"]),
        ("trainjob", ["ConfigMap", "TrainingRuntime", "TrainJob"]),
        ("pytorchjob", ["ConfigMap", "PyTorchJob"]),
        ("job", ["ConfigMap", "Service", "Job"]),
    ],
)
def test_kubectl_creates_the_job(tmp_path: Path, kind: str, created: list[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("mixed_precision: bf16\nnum_machines: 2\n")
    options = ("--config_file", str(config), "--kubernetes_kind", kind)
    with api_server(tmp_path) as (cluster, kubeconfig):
        done = launch(tmp_path, kubeconfig, *options, "--kubernetes_namespace", "team")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [one[0] for one in cluster.objects] == created
        assert {one[1] for one in cluster.objects} == {"team"}
        assert "kubectl logs --follow --prefix" in done.stdout
        # The server refuses fields that it does not know.
        assert all("fieldValidation=Strict" in asked for asked in cluster.asked)
        before = len(cluster.asked)
        again = launch(tmp_path, kubeconfig, *options, "--kubernetes_namespace", "team")
        assert again.returncode == 1
        assert f"already has the {created[-1]} 'train'" in again.stderr
        assert len(cluster.asked) == before, "it changed objects of the job that exists"
    dry = launch(tmp_path, kubeconfig, *options, "--kubernetes_namespace", "team", "--dry_run")
    for document in yaml.safe_load_all(dry.stdout):
        stored = cluster.objects[document["kind"], "team", document["metadata"]["name"]]
        stored["metadata"].pop("annotations", None)  # of kubectl apply
        assert stored == document


@needs_kubectl
def test_operator_that_is_not_installed_is_named(tmp_path: Path) -> None:
    only = {name: RESOURCES[name] for name in ("v1", "batch/v1")}
    with api_server(tmp_path, only) as (cluster, kubeconfig):
        done = launch(tmp_path, kubeconfig)
        assert done.returncode == 1
        assert "The cluster has no JobSet" in done.stderr
        assert "--kubernetes_kind job" in done.stderr
        assert launch(tmp_path, kubeconfig, "--kubernetes_kind", "job").returncode == 0
        assert list(cluster.objects) == [("Job", "default", "train")]


@needs_kubectl
def test_context_is_required_and_can_be_named(tmp_path: Path) -> None:
    with api_server(tmp_path, context="") as (cluster, kubeconfig):
        done = launch(tmp_path, kubeconfig)
        assert done.returncode == 1
        assert "kubectl has no current context" in done.stderr
        done = launch(tmp_path, kubeconfig, "--kubernetes_context", "here")
        assert done.returncode == 0, done.stderr
        assert "kubectl --context here logs" in done.stdout
        assert list(cluster.objects) == [("JobSet", "default", "train")]
        done = launch(tmp_path, kubeconfig, "--kubernetes_context", "elsewhere")
        assert done.returncode == 1
        assert "elsewhere" in done.stderr


def test_without_kubectl_the_job_can_be_written(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    done = launch(tmp_path, "/dev/null", path=str(nothing))
    assert done.returncode != 0
    assert "There is no kubectl on the PATH" in done.stderr
    assert "--kubernetes_output job.yaml" in done.stderr
    done = launch(tmp_path, "/dev/null", "--kubernetes_output", "job.yaml", path=str(nothing))
    assert done.returncode == 0, done.stderr
    dry = launch(tmp_path, "/dev/null", "--dry_run", path=str(nothing))
    assert (tmp_path / "job.yaml").read_text() == dry.stdout
    done = launch(tmp_path, "/dev/null", "--kubernetes_output", "no/job.yaml", path=str(nothing))
    assert (done.returncode, "Cannot write no/job.yaml" in done.stderr) == (1, True)
