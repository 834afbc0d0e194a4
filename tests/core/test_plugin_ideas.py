"""Plugins that reduce gradients, and that add or replace optimizers and schedulers."""

from __future__ import annotations

from pathlib import Path

import idea_plugins
import pytest
from support import case_names, check_case, run_workers

WORKER = Path(__file__).with_name("idea_worker.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_workers(
        WORKER, 2, timeout=200, env=idea_plugins.write(tmp_path_factory.mktemp("ideas"))
    )


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(WORKER))
def test_case(run, case):
    check_case(run, case)
