"""What the first pages show, typed as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dummies import distribution

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.dist


def blocks(page: str, language: str) -> list[str]:
    """Return the code of one language that a page shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run(folder: Path, *command: str, path: Path | None = None) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environ = {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_quickstart_runs_as_pasted(tmp_path: Path, processes: int) -> None:
    (script,) = blocks("docs/quickstart.md", "python")
    (tmp_path / "train.py").write_text(script)
    launch = ["-m", "accelerate_core", "launch", "--cpu", "--num_processes", str(processes)]
    out = run(tmp_path, *(launch if processes > 1 else []), "train.py")
    said = re.search(r"(\d+) of 400 are right", out)
    assert said is not None, out
    assert int(said[1]) > 380
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.timeout(300)
def test_the_backend_of_the_readme_trains_one_model(tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    points = tomllib.loads("\n".join(blocks("README.md", "toml")))["project"]["entry-points"]
    groups = {
        group.removeprefix("accelerate_core."): {n: t.partition(":")[2] for n, t in its.items()}
        for group, its in points.items()
    }
    distribution(tmp_path, "ring", code, groups)
    checks = (
        "selection declarations same_start training gradients_meet branches accumulation learning"
    )
    only = [word for check in checks.split() for word in ("--only", check)]
    command = ["-m", "accelerate_core", "plugins", "check", "ring", "--json", *only]
    told = json.loads(run(tmp_path, *command, path=tmp_path))
    assert told["passed"]
    assert [one["name"] for one in told["checks"] if one["state"] != "passed"] == []
