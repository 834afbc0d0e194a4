"""Runs on two machines, simulated by two network namespaces joined by a virtual cable.

The tests are skipped if namespaces can't be created, which needs root or CAP_NET_ADMIN, or if `ip`
is not installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import clean_environment

TRAIN = Path(__file__).with_name("train.py")
HOSTS = ("10.77.0.1", "10.77.0.2")
TIMEOUT = 150


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"acc{os.getpid()}t"
    made = _ip("netns", "add", name)
    if made.returncode == 0:
        _ip("netns", "del", name)
    return made.stderr.strip()


WHY_NOT = _why_not()
pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces here: {WHY_NOT}"),
]


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Create two namespaces, each with its own loopback device and one end of the cable."""
    names = [f"acc{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            assert _ip("netns", "add", name).returncode == 0
        made = _ip(
            *("link", "add", "eth7", "netns", names[0], "type", "veth"),
            *("peer", "name", "eth7", "netns", names[1]),
        )
        if made.returncode != 0:
            pytest.skip(f"no veth pair here: {made.stderr.strip()}")
        for name, address in zip(names, HOSTS, strict=True):
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth7"),
                ("link", "set", "eth7", "up"),
                ("link", "set", "lo", "up"),
            ):
                assert _ip("-n", name, *words).returncode == 0
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


@contextlib.contextmanager
def started(
    names: list[str], *arguments: str, launch: list[str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the same launch on both hosts, and kill what is left of it at the end."""
    environ = clean_environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    runs = []
    for rank, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "accelerate_core.cli"]
        command += ["launch", "--cpu", "--num_machines", "2", "--num_processes", "4"]
        command += ["--main_process_ip", HOSTS[0], "--machine_rank", str(rank), *launch]
        runs.append(
            subprocess.Popen(
                [*command, str(TRAIN), *arguments],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        yield runs
    finally:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


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
    with started(hosts, str(broken), "20", "0.1", launch=launch) as runs:
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
    with started(hosts, str(tmp_path), "2000", "0.05", launch=C10D) as runs:
        for rank in (0, 3):
            wait_for_step(tmp_path, rank, 3)
        cut = time.monotonic()
        assert _ip("-n", hosts[1], "link", "set", "eth7", "down").returncode == 0
        said = outputs(runs, timeout=110)
        seconds = time.monotonic() - cut
    assert [run.returncode == 0 for run in runs] == [False, False], "\n".join(said)
    assert seconds < 70  # 10 s for the process group, plus the time until the agents give up
    for text in said:
        assert "Error" in text, text
