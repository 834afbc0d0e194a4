"""A project for Accelerate has the same results after one pip command, without edits."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

import pytest
from clients import (
    ENVIRONMENTS,
    HERE,
    ROWS,
    TOLERANCE,
    differences_from_accelerate,
    launch_project,
    recorded,
)

WHEEL = HERE.parents[1] / "extensions/drop_in/accelerate"


@pytest.mark.timeout(600)
def test_project_is_migrated_with_one_pip_command(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    below = sysconfig.get_path("purelib")
    (site / "below.pth").write_text(f"{below}\nimport site; site.addsitedir({below!r})\n")
    # The wheel's dependencies are already installed. Normally, use `pip install accelerate-*.whl`.
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    how = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *how, "--wheel-dir", str(tmp_path), str(WHEEL)], check=True)
    (wheel,) = tmp_path.glob("accelerate-*.whl")
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(wheel)], check=True)
    for processes in (1, 2):
        project = tmp_path / f"project-{processes}"
        shutil.copytree(HERE / "project", project)
        ours = launch_project(tmp_path / "env" / "bin", project, processes)
        again = shutil.copytree(HERE / "project", tmp_path / f"theirs-{processes}")
        found = differences_from_accelerate(
            ours,
            recorded("project", processes),
            partial(launch_project, ENVIRONMENTS / "theirs" / "bin", again, processes),
        )
        off, where = max(found)
        ROWS.append((f"project-{processes}", off, where))
        assert off <= TOLERANCE, where
