"""The digits are started in every way; a killed run resumes and ends as a run without a break."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ways
from simulated_machines import LOGIN, Machines, run_environment
from slurm_cluster import SlurmCluster
from ssh_hosts import SshHosts
from table import Row
from ways import Way

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
KILLED_AT = 50
SAVED_AT = 40

#: Results of runs without a break, by number of ranks.
_references: dict[int, dict[str, object]] = {}


@pytest.fixture
def reference(machines: Machines, tmp_path: Path) -> Callable[[int], dict[str, object]]:
    """Return the result of a run without a break on a number of ranks."""

    def result(ranks: int) -> dict[str, object]:
        if ranks not in _references:
            folder = tmp_path / "reference"
            launch = ["accelerate-core", "launch", "--num_processes", str(ranks), ways.TRAIN]
            done = machines.run(LOGIN, *launch, folder, env=run_environment(), cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
            _references[ranks] = read_result(folder)
        return _references[ranks]

    return result


def read_result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "result.json").read_text())


def check_way(
    machines: Machines,
    name: str,
    way: Way,
    folder: Path,
    env: dict[str, str],
    reference: Callable[[int], dict[str, object]],
) -> Row:
    """Start a way with a rank that raises, and with a rank that is killed, and return its row."""

    def run(arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
        begun = time.time()
        shell = ["bash", "-c", way.shell(arguments, folder)]
        return machines.run(LOGIN, *shell, env=env, cwd=folder, timeout=200), begun

    failed, begun = run("failing --fail")
    assert failed.returncode != 0, failed.stderr[-3000:]
    assert "this rank fails on purpose" in failed.stderr + failed.stdout
    first_step = min(float(file.read_text()) for file in (folder / "failing").glob("first.*"))

    killed, _ = run("killed --kill")
    if way.restarts:
        assert killed.returncode == 0, killed.stderr[-3000:]
        who = "restarts"
    else:
        assert killed.returncode != 0
        again, _ = run("killed --kill")
        assert again.returncode == 0, again.stderr[-3000:]
        who = "run again"
    result, expected = read_result(folder / "killed"), reference(way.ranks)
    assert result["resumed"] == SAVED_AT
    assert {**result, "resumed": 0} == expected, "not the same weights as without a break"
    resumed = f"{who}, continues at step {result['resumed']}"
    status = failed.returncode
    if status < 0:
        status = 128 - status
    return Row(name, way.ranks, first_step - begun, status, resumed, int(str(result["correct"])))


@pytest.mark.parametrize("name", ways.LOCAL)
def test_run_on_one_machine_resumes_after_a_kill(
    name: str, machines: Machines, tmp_path: Path, reference, table_row: Callable[[Row], None]
) -> None:
    way = ways.LOCAL[name]
    table_row(check_way(machines, name, way, tmp_path, run_environment(), reference))


@pytest.mark.parametrize("name", ways.SLURM)
def test_run_on_slurm_resumes_after_a_kill(
    name: str, slurm: SlurmCluster, tmp_path: Path, reference, table_row: Callable[[Row], None]
) -> None:
    env = slurm.environment()
    table_row(check_way(slurm.machines, name, ways.SLURM[name], tmp_path, env, reference))


@pytest.mark.parametrize("name", {**ways.MPI, **ways.SSH})
def test_run_over_ssh_resumes_after_a_kill(
    name: str, ssh: SshHosts, tmp_path: Path, reference, table_row: Callable[[Row], None]
) -> None:
    way = {**ways.MPI, **ways.SSH}[name]
    if way.needs is not None and not way.needs.is_dir():
        pytest.skip(f"{way.needs} is missing (make engines)")
    row = check_way(ssh.machines, name, way, tmp_path, run_environment(), reference)
    table_row(row)
    assert ssh.machines.processes(str(tmp_path)) == []
