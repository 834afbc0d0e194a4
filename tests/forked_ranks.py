"""Forks the ranks of conformance suites and of `accelerate_testing.run_workers`, and torchrun, from the pool.

Starting three interpreters for each launch would take half of the time of a suite. Another process that a
test starts forks its ranks if it has the variables of `environment()` and calls `fork_ranks()`, which
`pytest -p forked_ranks` does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelerate_testing import processes, runner

#: The interpreter that forks, in the environment of a process that a test starts.
_PYTHON = "FORKED_RANKS_PYTHON"

_command_of = processes.torchrun


def _torchrun(nproc: int) -> list[str]:
    return [_python(), *_command_of(nproc)[1:]]


def _python() -> str:
    if _PYTHON in os.environ:
        return os.environ[_PYTHON]
    from warm_python import warm_python

    return str(warm_python())


def environment(*paths: str | Path) -> dict[str, str]:
    """Return variables for another process, which then can import this module too.

    Args:
        paths: the beginning of its PYTHONPATH.
    """
    path = os.pathsep.join(map(str, [*paths, Path(__file__).parent]))
    return {_PYTHON: _python(), "PYTHONPATH": path}


def fork_ranks(patch: pytest.MonkeyPatch | None = None) -> None:
    """Fork the ranks until `patch` is undone, or as long as this process lives."""
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(processes, "torchrun", _torchrun)
    patch.setattr(runner, "torchrun", _torchrun)


def pytest_configure(config: Any) -> None:
    """Fork the ranks of all tests, as a plugin of pytest."""
    fork_ranks()
