"""Simulated machines with SLURM and ssh, and the table of what was run on them.

`--engines-report FILE` writes the table between the marks in a Markdown file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import needed
import pytest
import ways
from simulated_machines import Machines, run_environment
from slurm_cluster import SlurmCluster
from ssh_hosts import SshHosts
from table import Row, write_table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines-report", metavar="FILE", help="write the table of runs to this page"
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ways.Result]:
    """Return the result of a run without a break on a number of ranks."""
    found: dict[int, ways.Result] = {}

    def result(ranks: int) -> ways.Result:
        if ranks not in found:
            folder = tmp_path_factory.mktemp("reference")
            launch = ["accelerate-core", "launch", "--num_processes", str(ranks), ways.TRAIN]
            env = run_environment()
            subprocess.run([*launch, folder], env=env, cwd=folder, timeout=200, check=True)
            found[ranks] = ways.read_result(folder)
        return found[ranks]

    return result


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three simulated machines: `login`, and the nodes `n1` and `n2`."""
    packages, rights = needed.missing_packages(), needed.missing_rights()
    if packages:
        pytest.skip(f"not installed: {' '.join(packages)} (make engines)")
    if rights:
        pytest.skip(rights)
    made = Machines(tmp_path_factory.mktemp("machines"))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def slurm_session(machines: Machines) -> SlurmCluster:
    made = SlurmCluster(machines)
    made.start()
    return made


@pytest.fixture
def slurm(slurm_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """A SLURM cluster of two nodes without jobs."""
    slurm_session.wait_for_nodes({"idle"})
    yield slurm_session
    slurm_session.reset()


@pytest.fixture(scope="session")
def ssh(machines: Machines) -> SshHosts:
    """ssh from each of the simulated machines to the nodes."""
    made = SshHosts(machines)
    made.start()
    return made


@pytest.fixture
def table_row(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Add a row to the table of what was run. It is written immediately, in case the tests are ended."""
    page = request.config.getoption("--engines-report", default=None)

    def add(row: Row) -> None:
        print(row.line())
        if page:
            write_table([row], Path(page))

    return add
