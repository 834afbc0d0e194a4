"""Hooks of `save_state` and `load_state`. The cases are in `state_hooks_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("state_hooks_worker.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=(1, 2), ids=lambda count: f"{count} ranks")
def run(request):
    environment = {"OMP_NUM_THREADS": "1"}
    return run_workers(WORKER, request.param, timeout=200, env=environment, more=("deepspeed",))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)
