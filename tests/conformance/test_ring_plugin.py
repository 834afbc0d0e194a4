"""A backend from another repository is found, selected, configured and correct, without patches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import run_workers

from accelerate_testing import CompletedRun

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("ring_worker.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which the example is installed, for the path of the ranks."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    how = ["--no-deps", "--no-build-isolation", "--target", str(folder)]
    source = str(ROOT / "examples" / "ring_plugin")
    subprocess.run([*pip, *how, source], check=True, timeout=120, capture_output=True)
    return str(folder)


def ranks(site: str, count: int, *arguments: str, **env: str) -> CompletedRun:
    paths = f"{Path(__file__).parents[1]}:{site}"
    return run_workers(
        WORKER, count, arguments, timeout=150, env={"PYTHONPATH": paths, **env}
    ).checked()


@pytest.mark.dist
def test_ring_trains_like_one_process(site: str) -> None:
    alone = ranks(site, 1).results[0]
    ring = ranks(site, 2, ACCELERATE_USE_RING="1", ACCELERATE_RING_CHUNK_MB="3").results
    assert (alone["name"], ring[0]["name"], ring[0]["type"]) == ("single", "ring", "RING")
    assert ring[0]["said"] == ring[1]["said"]
    assert ring[0]["said"] == pytest.approx(alone["said"], abs=1e-5)
    assert "backend = 'ring'  (ACCELERATE_USE_RING is set)" in ring[0]["explain"]
    chunk = "ring.chunk_mb = 3  (environment variable ACCELERATE_RING_CHUNK_MB)"
    assert chunk in ring[0]["explain"]


@pytest.mark.dist
def test_argument_and_exported_name_select_it(site: str) -> None:
    said = ranks(site, 2, "argument").results[0]["explain"]
    assert "backend = 'ring'  (ring_plugin was passed)" in said
    assert "ring.chunk_mb = 1  (constructor argument ring_plugin)" in said


@pytest.mark.dist
def test_it_is_not_used_unless_requested(site: str) -> None:
    assert ranks(site, 2).results[0]["name"] == "ddp"
