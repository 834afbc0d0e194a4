"""Runs that are killed with SIGKILL at random moments end with the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from support import clean_environment

WORKER = Path(__file__).with_name("kill_worker.py")
TIMEOUT = 120


def start(
    nproc: int, folder: Path, how: str, backend: str | None = None, pause: float = 0.0
) -> subprocess.Popen[str]:
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1"]
        command += ["--nproc_per_node", str(nproc)]
    command += [str(WORKER), str(folder), how, str(folder / "weights.pt"), str(pause)]
    command += [backend] if backend else []
    return subprocess.Popen(
        command,
        env=clean_environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill all processes of the run at once, so that none of them can clean up."""
    try:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = [process]
    for one in family:
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.communicate()


def finish(process: subprocess.Popen[str]) -> None:
    try:
        _, said = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == 0, said[-4000:]


def check(
    tmp_path: Path, nproc: int, runs: int, kills: int, seed: int, backend: str | None = None
) -> None:
    dice = random.Random(seed)
    reference = tmp_path / "reference"
    reference.mkdir()
    finish(start(nproc, reference, "blocking", backend))
    expected = torch.load(reference / "weights.pt")
    inside = 0
    for number in range(runs):
        folder = tmp_path / f"run_{number}"
        folder.mkdir()
        how = ("blocking", "background")[number % 2]
        for _ in range(kills):
            process = start(nproc, folder, how, backend, pause=0.02)
            before = set(folder.glob("checkpoints/checkpoint_*"))
            until = time.monotonic() + TIMEOUT
            # Wait for the first save after this start, then a random time, or until a save begins.
            while process.poll() is None and time.monotonic() < until:
                if set(folder.glob("checkpoints/checkpoint_*")) - before:
                    break
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 0.3))
            if dice.random() < 0.6:
                while process.poll() is None and time.monotonic() < until:
                    if any(folder.glob("checkpoints/.checkpoint_*.saving-*")):
                        break
            kill(process)
            inside += any(folder.glob("checkpoints/.checkpoint_*"))
        finish(start(nproc, folder, how, backend))
        batches, weights = torch.load(folder / "weights.pt")
        assert batches == expected[0], (number, batches)
        assert torch.equal(weights, expected[1]), number
        left = [path.name for path in folder.glob("checkpoints/.*")]
        assert not left, left
    assert inside >= runs * kills // 4, f"only {inside} of {runs * kills} kills hit a save"
    print(f"{runs} runs of {kills} kills on {nproc} processes, {inside} inside a save")


@pytest.mark.parametrize(
    ("nproc", "runs", "backend"),
    # Few runs for backends, because their engines take seconds to start.
    [(1, 2, None), (2, 1, None), (2, 1, "fsdp2"), (2, 1, "deepspeed")],
)
def test_killed_runs_end_with_the_same_weights(
    tmp_path: Path, nproc: int, runs: int, backend: str | None
) -> None:
    check(tmp_path, nproc, runs=runs, kills=2, seed=nproc, backend=backend)


@pytest.mark.soak
@pytest.mark.timeout(6000)
@pytest.mark.parametrize(
    ("nproc", "runs", "backend"),
    [(1, 50, None), (2, 10, None), (2, 10, "fsdp2"), (2, 10, "deepspeed")],
)
def test_many_killed_runs_end_with_the_same_weights(
    tmp_path: Path, nproc: int, runs: int, backend: str | None
) -> None:
    check(tmp_path, nproc, runs=runs, kills=3, seed=100 + nproc, backend=backend)
