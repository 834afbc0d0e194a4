"""Tests of the harness itself: the rehearsal on the CPU, and the table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, make_importable

HERE = Path(__file__).parent
pytestmark = pytest.mark.anywhere


def run(report: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(HERE), "--gpu-report", str(report), "-q"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "not anywhere", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_rehearsal_needs_only_the_paths(tmp_path: Path) -> None:
    paths = os.pathsep.join(make_importable(tmp_path / "metadata"))
    report = tmp_path / "made" / "gpu.md"
    chosen = "precision or device_feed or groups or big or checkpoints or memory"
    done = run(report, "--rehearse", "-k", chosen, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout[-4000:]
    text = report.read_text()
    assert text in done.stdout
    assert "| precision: mixed precision matches torch amp[fp16-dtype0] | passed |" in text
    assert "| device feed: copying and computing overlap | skipped |" in text
    assert " 0 failed" in text


def test_the_time_is_limited(tmp_path: Path) -> None:
    done = run(tmp_path / "gpu.md", "--rehearse", "--gpu-seconds", "0", "-k", "big")
    assert done.returncode == 0
    assert "| skipped | 0.0 | 0 seconds are over |" in (tmp_path / "gpu.md").read_text()


def test_without_a_device_every_test_is_skipped(tmp_path: Path) -> None:
    done = run(tmp_path / "gpu.md", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    text = (tmp_path / "gpu.md").read_text()
    if "torch finds no accelerator" not in text:
        pytest.skip("this machine has a device that cannot be hidden")
    assert done.returncode == 0
    assert "0 passed, 0 failed" in text
