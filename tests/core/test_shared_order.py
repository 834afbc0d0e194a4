"""All ranks read in one order. The cases are in `order_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("order_worker.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=(1, 2, 4), ids=lambda count: f"{count} ranks")
def run(request):
    return run_workers(WORKER, request.param, timeout=150)


@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)
