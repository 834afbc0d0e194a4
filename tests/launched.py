"""Run the command line in a separate process with a time limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pool
from support import clean_environment

TIMEOUT = 120


def run_cli(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    forked: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `accelerate-core` with these arguments.

    Args:
        forked: fork the command from a warm interpreter (see `pool`). Processes that it starts are
            not forked.
    """
    command = ["-m", "accelerate_core.cli", *map(str, arguments)]
    environ = clean_environment(**(env or {}))
    if forked:
        return pool.run(command, environ, TIMEOUT, cwd=cwd)
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
