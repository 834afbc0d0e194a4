"""Start the command line as a user does, in a process of its own and with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT = 120

#: Variables that must not leak from whoever runs the tests into what they start.
_HIDDEN = ("ACCELERATE_", "TORCHELASTIC_", "OMPI_", "PMI_", "MASTER_")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without anything a launcher would read."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(_HIDDEN) and name not in _RANKS
    }
    return {**kept, "ACCELERATE_CONFIG_HOME": os.devnull, **more}


def run_cli(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `accelerate-core` with these arguments; never longer than the time limit."""
    return subprocess.run(
        [sys.executable, "-m", "accelerate_core.cli", *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
