"""Runs on two machines, simulated by two network namespaces joined by a virtual cable.

The tests are skipped if namespaces can't be created, which needs root or CAP_NET_ADMIN, or if `ip`
is not installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from two_hosts import ip, needs_two_hosts, started

TRAIN = Path(__file__).with_name("train.py")
TIMEOUT = 150

pytestmark = needs_two_hosts


def outputs(runs: list[subprocess.Popen[str]], timeout: float = TIMEOUT) -> list[str]:
    until = time.monotonic() + timeout
    return [run.communicate(timeout=max(1, until - time.monotonic()))[0] for run in runs]


def wait_for_step(folder: Path, rank: int, step: int) -> int:
    """Wait until a rank has completed a step, and return its process ID."""
    file, until = folder / f"rank{rank}.step", time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):
            pid, done = file.read_text().split()
            if int(done) >= step:
                return int(pid)
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has not reached step {step}")


C10D = ["--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=60"]


def test_killed_processes_are_restarted_and_resume(hosts: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    launch = [*C10D, "--max_restarts", "2"]
    with started(hosts, TRAIN, str(broken), "20", "0.1", launch=launch) as runs:
        for pid in [wait_for_step(broken, rank, 7) for rank in (2, 3)]:
            os.kill(pid, signal.SIGKILL)  # the processes of the second host
        said = outputs(runs)
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    made = json.loads((broken / "done.json").read_text())
    assert made["first"] >= 5  # it resumed from a checkpoint
    assert made["size"] == 4
    for got, expected in zip(made["weights"], _trained_plainly(20, 4), strict=True):
        torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-5, atol=1e-6)


def _trained_plainly(steps: int, ranks: int) -> list[torch.Tensor]:
    """Train as train.py does, in one process that reads the data of all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(steps):
        seeds = [torch.Generator().manual_seed(100 * number + rank) for rank in range(ranks)]
        losses = [model(torch.randn(8, 4, generator=one)).square().mean() for one in seeds]
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in model.state_dict().values()]


def test_cut_network_cable_is_an_error_on_both_machines(hosts: list[str], tmp_path: Path) -> None:
    with started(hosts, TRAIN, str(tmp_path), "2000", "0.05", launch=C10D) as runs:
        for rank in (0, 3):
            wait_for_step(tmp_path, rank, 3)
        cut = time.monotonic()
        assert ip("-n", hosts[1], "link", "set", "eth7", "down").returncode == 0
        said = outputs(runs, timeout=110)
        seconds = time.monotonic() - cut
    assert [run.returncode == 0 for run in runs] == [False, False], "\n".join(said)
    assert seconds < 70  # 10 s for the process group, plus the time until the agents give up
    for text in said:
        assert "Error" in text, text
