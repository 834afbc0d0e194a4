"""`launch` starts DeepSpeed's own launchers on two machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated_machines import LOGIN, run_environment
from ssh_hosts import SshHosts

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400), pytest.mark.needs("deepspeed")]

WHO = """
import os
from accelerate_core import Accelerator

accelerator = Accelerator(process_group_timeout=60)
number, size, kind = accelerator.process_index, accelerator.num_processes, accelerator.distributed_type
print(f"rank {number} of {size} on {os.uname().nodename} with {kind.value}", flush=True)
accelerator.end_training()
"""


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_launcher_of_deepspeed_starts_the_ranks(
    launcher: str, ssh: SshHosts, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "who.py").write_text(WHO)
    launch = ["accelerate-core", "launch", "--num_processes", "2", "--backend", "deepspeed"]
    hosts = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", launcher]
    command = [*launch, "--zero_stage", "1", *hosts, "who.py"]
    env = run_environment()
    done = ssh.machines.run(LOGIN, *command, env=env, cwd=tmp_path, timeout=300)
    lines = [line[line.index("rank ") :] for line in done.stdout.splitlines() if " on n" in line]
    expected = [f"rank {rank} of 2 on n{rank + 1} with DEEPSPEED" for rank in (0, 1)]
    assert sorted(lines) == expected, done.stderr[-3000:]
