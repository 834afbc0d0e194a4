"""Debug mode compares the ranks' parameters after two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

pytestmark = [pytest.mark.dist, pytest.mark.needs("torch>=2.11")]  # for fsdp2
WORKER = Path(__file__).with_name("debug_worker.py")


@pytest.mark.parametrize("debug", [True, False])
def test_debug_mode_detects_ranks_that_train_different_models(debug: bool) -> None:
    done = run_workers(WORKER, 2, env={"ACCELERATE_DEBUG_MODE": "1"} if debug else {})
    assert done.ok, done.story
    for forgets, *fine, later in done.results:
        assert fine == [[0, ""]] * 3
        assert later[0] == (12 if debug else 0)
        assert ("After 12 steps, 'weight'" in later[1]) == debug
        step, said = forgets
        assert step == (2 if debug else 0)
        assert ("'forgets' (which declares reduces_gradients='backward')" in said) == debug
        assert ("'weight' and 1 other parameter(s) differ between data rank 1" in said) == debug
