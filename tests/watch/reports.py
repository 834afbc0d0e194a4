"""Start `stuck.py` and read what the run prints until a report is complete."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from following import Run, kill
from support import clean_environment

SCRIPT = Path(__file__).with_name("stuck.py")
#: Seconds after which these runs report a hang.
HANG_AFTER = 3.0


@contextlib.contextmanager
def started(how: str, ranks: int, prefix: tuple[str, ...] = (), **environ: str) -> Iterator[Run]:
    """Launch the script on this many ranks, and kill what is left of it at the end."""
    words = ["launch", "--cpu", "--num_processes", str(ranks), str(SCRIPT), how]
    environ = {
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_WATCH_HANG_AFTER": str(HANG_AFTER),
        **environ,
    }
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "accelerate_core.cli", *words],
        env=clean_environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Run(process)
    finally:
        kill(process)
