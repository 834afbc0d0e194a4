"""Start the command line as a user does, in a process of its own and with a time limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support import clean_environment

TIMEOUT = 120


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
