"""After a signal to one rank, all ranks save at the same step boundary and exit with status 75."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import clean_environment

from accelerate_core import Accelerator
from accelerate_core.errors import ConfigurationError
from accelerate_core.utils import ProjectConfiguration

WORKER = Path(__file__).with_name("preempt_worker.py")


def start(nproc: int, folder: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu"]
    command += ["--num_processes", str(nproc), str(WORKER), str(folder), str(steps)]
    return subprocess.Popen(
        command,
        env=clean_environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("nproc", "to", "number"),
    [
        (1, "rank", signal.SIGTERM),
        (2, "rank", signal.SIGTERM),
        (2, "launcher", signal.SIGUSR1),
        (2, "launcher", signal.SIGTERM),
    ],
)
def test_signal_saves_and_exits_with_status_75(
    tmp_path: Path, nproc: int, to: str, number: signal.Signals
) -> None:
    process = start(nproc, tmp_path, 1)
    last = tmp_path / f"{nproc - 1}.pid"
    until = time.monotonic() + 60
    while not (last.exists() and last.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(int(last.read_text()) if to == "rank" else process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said[-3000:]
    assert "Preempted: the state was saved to" in said
    (directory,) = (tmp_path / "checkpoints").iterdir()
    content = json.loads((directory / "manifest.json").read_text())["content"]
    assert content["step"] > 0
    assert "gradients_0.bin" not in content["files"], "saved inside an accumulation cycle"
    again = start(nproc, tmp_path, 0)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said[-3000:]
    straight = tmp_path / "straight"
    straight.mkdir()
    other = start(nproc, straight, 0)
    _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said[-3000:]
    expected, found = torch.load(straight / "weights.pt"), torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_invalid_preemption_signals_are_refused_immediately(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'SIGTREM'.*Did you mean 'SIGTERM'"):
        Accelerator(cpu=True, preemption_signals="SIGTREM")
    with pytest.raises(ConfigurationError, match="needs a directory to save to"):
        Accelerator(cpu=True, preemption_signals="TERM")
    before = signal.getsignal(signal.SIGUSR2)
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with Accelerator(cpu=True, preemption_signals="USR2", project_config=config) as accelerator:
        assert signal.getsignal(signal.SIGUSR2) is not before
        assert not accelerator.preemption_requested
    assert signal.getsignal(signal.SIGUSR2) is before


LONELY = Path(__file__).with_name("lonely_worker.py")
LAUNCH = ["accelerate_core", "launch", "--cpu", "--num_processes", "2"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("launcher", "fault", "cause"),
    [
        (LAUNCH, "kill", "Rank 1 failed (killed by SIGKILL"),
        (LAUNCH, "long", "Rank 1 failed (killed by SIGKILL"),
        (LAUNCH, "leave", "Rank 1 (process"),
        (TORCHRUN, "raise", "Rank 1 (process"),
        (TORCHRUN, "leave", "Rank 1 (process"),
    ],
)
def test_ranks_that_cannot_save_without_a_failed_one_end_at_once(
    tmp_path: Path, launcher: list[str], fault: str, cause: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, str(LONELY), str(tmp_path), fault],
        env=clean_environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks = [tmp_path / "0.pid", tmp_path / "1.pid"]
    until = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in ranks):
        assert time.monotonic() < until
        time.sleep(0.02)
    first, last = (int(file.read_text()) for file in ranks)
    if fault == "long":
        time.sleep(1.0)
        os.kill(last, signal.SIGKILL)
    if fault == "leave":  # no launcher stops the others when a rank leaves with status 0
        while process.poll() is None and not has_left(last):
            time.sleep(0.02)
        os.kill(first, signal.SIGTERM)
    start = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - start < 25, said[-3000:]
    assert process.returncode not in (0, 75), said[-3000:]
    assert said.count("The run ends without one.") == 1, said[-3000:]
    assert cause in said
    if launcher is LAUNCH and fault != "leave":
        assert "\nRank 1 on " in said
    assert not list(tmp_path.glob("checkpoints/*"))


def has_left(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
