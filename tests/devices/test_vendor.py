"""The example of a vendor's distribution passes its own tests when it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import support

from accelerate_testing.fake_device import build

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party" / "accelerate-imagine"


@pytest.mark.needs("torch>=2.13")
def test_a_vendor_needs_one_distribution(tmp_path) -> None:
    build.compiled()  # before the time limit starts
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += [
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(tmp_path / "site"),
        str(EXAMPLE),
    ]
    subprocess.run(command, check=True, timeout=120)
    paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    environ = support.clean_environment(PYTHONPATH=os.pathsep.join(filter(None, paths)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--confcutdir",
        "tests",
    ]
    done = subprocess.run(
        command, cwd=EXAMPLE, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 passed" in done.stdout


def test_the_example_stays_short() -> None:
    files = [*EXAMPLE.rglob("*.py"), EXAMPLE / "pyproject.toml"]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 150
