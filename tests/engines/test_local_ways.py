"""The digits are started on this machine, without root; a killed run resumes. Part of `make faults`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import ways
from simulated_machines import run_environment
from table import Row

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ways.LOCAL)
def test_run_on_one_machine_resumes_after_a_kill(
    name: str,
    tmp_path: Path,
    reference: Callable[[int], ways.Result],
    table_row: Callable[[Row], None],
) -> None:
    def run(shell: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", shell],
            env=run_environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    table_row(ways.check_way(name, ways.LOCAL[name], run, tmp_path, reference))
