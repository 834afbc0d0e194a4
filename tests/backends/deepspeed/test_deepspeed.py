"""DeepSpeed on two ranks. The cases are in the workers in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

HERE = Path(__file__).parent
CASES = [
    (worker, case)
    for worker in ("deepspeed_worker.py", "deepspeed_half_worker.py", "deepspeed_parity_worker.py")
    for case in case_names(HERE / worker)
]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("worker", "case"), CASES, ids=[case for _, case in CASES])
def test_case(runs, worker, case):
    if worker not in runs:
        environment = {"OMP_NUM_THREADS": "1"}
        runs[worker] = run_workers(
            HERE / worker, 2, timeout=300, env=environment, more=("deepspeed",)
        )
    check_case(runs[worker], case)
