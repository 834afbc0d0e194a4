"""A prepared scheduler that is stepped with a metric. Cases: `metric_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("metric_worker.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=(2, 3), ids=lambda count: f"{count} ranks")
def run(request):
    return run_workers(WORKER, request.param, timeout=150)


@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)


def test_metric_on_one_rank_only_is_an_error_that_names_the_others():
    run = run_workers(WORKER.with_name("metric_alone_worker.py"), 2, timeout=60)
    error, warning = run.results[0]
    assert error.startswith("RuntimeConflictError: ")
    for text in (error, warning):
        assert "ReduceLROnPlateau.step(metric)" in text
        assert "rank 1" in text
        assert "is_main_process" in text
