"""The digits are started in every way on two machines; a killed run ends as a run without a break."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import ways
from simulated_machines import LOGIN, Machines, run_environment
from slurm_cluster import SlurmCluster
from ssh_hosts import SshHosts
from table import Row

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def runner(machines: Machines, env: dict[str, str], folder: Path) -> ways.Run:
    """Return a function that runs a shell command on the login machine."""

    def run(shell: str) -> subprocess.CompletedProcess[str]:
        return machines.run(LOGIN, "bash", "-c", shell, env=env, cwd=folder, timeout=200)

    return run


@pytest.mark.parametrize("name", ways.SLURM)
def test_run_on_slurm_resumes_after_a_kill(
    name: str,
    slurm: SlurmCluster,
    tmp_path: Path,
    reference: Callable[[int], ways.Result],
    table_row: Callable[[Row], None],
) -> None:
    run = runner(slurm.machines, slurm.environment(), tmp_path)
    table_row(ways.check_way(name, ways.SLURM[name], run, tmp_path, reference))


@pytest.mark.parametrize("name", {**ways.MPI, **ways.SSH})
def test_run_over_ssh_resumes_after_a_kill(
    name: str,
    ssh: SshHosts,
    tmp_path: Path,
    reference: Callable[[int], ways.Result],
    table_row: Callable[[Row], None],
) -> None:
    way = {**ways.MPI, **ways.SSH}[name]
    if way.needs is not None and not way.needs.is_dir():
        pytest.skip(f"{way.needs} is missing (make engines)")
    run = runner(ssh.machines, run_environment(), tmp_path)
    table_row(ways.check_way(name, way, run, tmp_path, reference))
    assert ssh.machines.processes(str(tmp_path)) == []
