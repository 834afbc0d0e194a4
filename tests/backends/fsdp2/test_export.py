"""Exporting sharded models, and Muon. The cases are in `export_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("export_worker.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(runs, case, ranks):
    if ranks not in runs:
        runs[ranks] = run_workers(WORKER, ranks, timeout=300, env={"OMP_NUM_THREADS": "1"})
    check_case(runs[ranks], case)
