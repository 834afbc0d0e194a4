"""What the original's functions, classes and methods can be called with, ours can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_call_of_the_original_fits() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "signatures_worker.py")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["unknown"] == {}, "neither mended nor listed in absent.DIFFERENT"
    assert found["stale"] == [], "listed in absent.DIFFERENT, and the same"
    assert found["compared"] > 700
