"""DeepSpeed on one rank and on two. The cases are in the workers in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

HERE = Path(__file__).parent
#: Worker -> numbers of ranks.
WORKERS = {
    "deepspeed_worker.py": (2,),
    "deepspeed_half_worker.py": (2,),
    "deepspeed_parity_worker.py": (2,),
    "deepspeed_frozen_worker.py": (1, 2),
    "deepspeed_layers_worker.py": (2,),
}
CASES = [
    pytest.param(worker, ranks, case, id=f"{case}-{ranks}" if ranks != 2 else case)
    for worker, sizes in WORKERS.items()
    for ranks in sizes
    for case in case_names(HERE / worker)
]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("worker", "ranks", "case"), CASES)
def test_case(runs, worker, ranks, case):
    if (worker, ranks) not in runs:
        environment = {"OMP_NUM_THREADS": "1"}
        runs[worker, ranks] = run_workers(
            HERE / worker, ranks, timeout=300, env=environment, more=("deepspeed",)
        )
    check_case(runs[worker, ranks], case)
