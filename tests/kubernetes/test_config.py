"""`config` asks about the job, and the file that it writes is enough for a launch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml
from launched import run_cli
from support import clean_environment


def test_config_asks_about_the_job_instead_of_an_address(tmp_path: Path) -> None:
    environ = {"ACCELERATE_CONFIG_HOME": str(tmp_path), "HF_HOME": str(tmp_path / "theirs")}
    answers = ["2", "kubernetes", "16", "", "bf16", "", ""]
    job = ["", "registry.example/train:1", "", "nvidia.com/gpu=8, memory=64Gi", "", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_core.cli", "config"],
        env=clean_environment(**environ),
        input="\n".join([*answers, *job, ""]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Address of machine 0" not in done.stdout
    made = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert made["launcher"] == "kubernetes"
    assert made["kubernetes_config"] == {
        "kind": "jobset",
        "image": "registry.example/train:1",
        "resources": ["nvidia.com/gpu=8", "memory=64Gi"],
        "restarts": 3,
    }
    launched = run_cli("launch", "--dry_run", "train.py", env=environ, forked=True)
    *_, jobset = yaml.safe_load_all(launched.stdout)
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_faults_in_the_section_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kubernetes_config:\n  imgae: a\n  kind: jobst\n  restarts: -1\n")
    done = run_cli("config", "validate", file, cwd=tmp_path, forked=True)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "Unknown key 'imgae' in kubernetes_config" in said
    assert "Did you mean 'image'?" in said
    assert "Did you mean 'jobset'?" in said
    assert "line 4" in said


def test_env_report_names_the_launcher_and_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("launcher: kubernetes\nkubernetes_config:\n  image: a\n")
    settings = {"ACCELERATE_KUBERNETES_NAMESPACE": "team"}
    done = run_cli("env", "--json", "--config_file", file, env=settings)
    report = json.loads(done.stdout)
    assert "accelerate-kubernetes" in report["versions"]
    assert report["variables"]["ACCELERATE_KUBERNETES_NAMESPACE"] == "team"
    (row,) = [row for row in report["plugins"] if row["name"] == "kubernetes"]
    assert (row["kind"], row["state"]) == ("launcher", "active")
    assert "c.yaml line 1" in row["reason"]
