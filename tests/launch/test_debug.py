"""Debug mode compares what the ranks train, after two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

pytestmark = [pytest.mark.dist, pytest.mark.needs("torch>=2.11")]  # fsdp2 does
WORKER = Path(__file__).with_name("debug_worker.py")


@pytest.mark.parametrize("debug", [True, False])
def test_ranks_that_train_different_models_are_told_in_debug_mode(debug: bool) -> None:
    done = run_workers(WORKER, 2, env={"ACCELERATE_DEBUG_MODE": "1"} if debug else {})
    assert done.ok, done.story
    for forgets, *fine in done.results:
        assert fine == [[0, ""]] * 3
        step, said = forgets
        assert step == (2 if debug else 0)
        assert ("'forgets' says reduces_gradients='backward'" in said) == debug
        assert ("'weight' and 1 other parameter(s) of data rank 1" in said) == debug
