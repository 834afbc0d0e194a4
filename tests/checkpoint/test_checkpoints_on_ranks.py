"""Checkpoints of several ranks. The cases are in `checkpoint_worker.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("checkpoint_worker.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the cases on one rank, on two, and again on one, which loads what two saved."""
    shared = tmp_path_factory.mktemp("shared")
    return [run_workers(WORKER, count, [shared], timeout=150) for count in (1, 2, 1)]


@pytest.mark.parametrize("which", range(3), ids=["1 rank", "2 ranks", "1 rank after 2"])
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(runs, which, case):
    check_case(runs[which], case)
