"""8-bit and 4-bit weights, in the clients' environment, which has bitsandbytes."""

from __future__ import annotations

import subprocess

import pytest
from clients import ENVIRONMENTS, HERE
from support import clean_environment


@pytest.mark.skipif(
    not (ENVIRONMENTS / "ours").exists(), reason="run `make clients` to create the environment"
)
@pytest.mark.parametrize("worker", ["quantized_worker", "quantized_checkpoints_worker"])
def test_quantization_works_in_the_clients_environment(worker: str) -> None:
    command = "-m pytest -q -p no:cacheprovider --noconftest --timeout 200"
    done = subprocess.run(
        [ENVIRONMENTS / "ours/bin/python", *command.split(), HERE / f"{worker}.py"],
        env=clean_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
