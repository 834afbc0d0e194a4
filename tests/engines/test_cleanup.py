"""The simulated machines and their daemons end with the process that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_machines import Machines
from support import clean_environment

START = """
import sys, time
from pathlib import Path
from simulated_machines import Machines
from slurm_cluster import SlurmCluster
from ssh_hosts import SshHosts

machines = Machines(Path(sys.argv[1]))
try:
    machines.start()
    SlurmCluster(machines).start()
    SshHosts(machines).start()
    print("started", flush=True)
    time.sleep(300)
finally:
    machines.close()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_daemons_end_with_the_tests(machines: Machines, tmp_path: Path, number: int) -> None:
    here = str(Path(__file__).parent)
    env = clean_environment()
    env["PYTHONPATH"] = f"{here}:{env['PYTHONPATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", START, tmp_path], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        names = " ".join(machines.processes(str(tmp_path)))
        assert all(name in names for name in ("slurmctld", "slurmd", "munged", "sshd")), names
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
    until = time.monotonic() + 10
    while machines.processes(str(tmp_path)) and time.monotonic() < until:
        time.sleep(0.1)
    assert machines.processes(str(tmp_path)) == []
