"""An open iterator neither blocks nor crashes a process, however the process ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("leaving_worker.py")


@pytest.mark.dist
@pytest.mark.parametrize("how", ["fall off", "again", pytest.param("exit", marks=pytest.mark.soak)])
def test_process_exits_cleanly_with_an_open_iterator(how):
    run = run_workers(WORKER, 2, timeout=90, env={"LEAVE": how}, launched=True).checked()
    assert run.results == [[24.0, 25.0, 26.0, 27.0], [28.0, 29.0, 30.0, 31.0]]
