"""Long tests: a rank is killed at many random moments, and the run always ends."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("soak_worker.py")


@pytest.mark.soak
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_rank_killed_at_any_moment_stops_the_run() -> None:
    chance = random.Random(0)
    for _ in range(60):
        after = chance.uniform(0.0, 0.6)
        start = time.monotonic()
        run = run_workers(WORKER, 2, (after,), timeout=90)
        assert not run.timed_out, run.story
        assert run.returncode != 0
        assert time.monotonic() - start < 60
