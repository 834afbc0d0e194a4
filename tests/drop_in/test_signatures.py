"""Functions, classes and methods accept all calls that Accelerate's accept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pool

HERE = Path(__file__).parent


def test_signatures_accept_every_call_that_accelerate_accepts() -> None:
    done = pool.run([HERE / "signatures_worker.py"], os.environ, 240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["unknown"] == {}, "signatures differ without being listed in absent.DIFFERENT"
    assert found["stale"] == [], "signatures in absent.DIFFERENT do not differ"
    assert found["compared"] > 700
