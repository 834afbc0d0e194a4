"""Training with megatron on two and on four ranks; the cases are in `two_ranks.py`, `four_ranks.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import case_names, check_case, clean_environment, run_workers

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
WORKERS = {2: HERE / "two_ranks.py", 4: HERE / "four_ranks.py"}
CASES = [(ranks, case) for ranks, worker in WORKERS.items() for case in case_names(worker)]


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_case(runs, ranks, case):
    if ranks not in runs:
        environment = {"OMP_NUM_THREADS": "1"}
        runs[ranks] = run_workers(WORKERS[ranks], ranks, timeout=300, env=environment)
    check_case(runs[ranks], case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_error_without_a_cuda_device_names_an_alternative():
    script = "from accelerate_core import Accelerator; Accelerator(backend='megatron', cpu=True)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "megatron-core needs a CUDA device" in done.stderr
    assert "backend='fsdp2'" in done.stderr
