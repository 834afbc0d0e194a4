"""Runs of launch/elastic_worker.py, whose number of processes changes while they train."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import clean_environment

ELASTIC_WORKER = Path(__file__).parent / "launch" / "elastic_worker.py"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def run_alone(folder: Path, processes: int) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """Train in one process like an elastic run of `processes`. Return its samples and its end."""
    folder.mkdir()
    environment = clean_environment(
        OMP_NUM_THREADS="1",
        ACCELERATE_ELASTIC_POLICY="keep_global_batch",
        ACCELERATE_ELASTIC_PROCESSES=str(processes),
    )
    command = [sys.executable, ELASTIC_WORKER, folder]
    subprocess.run(command, env=environment, timeout=120, check=True)
    steps, [end] = records(folder)
    return steps, end


def records(folder: Path) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
    """Return the samples of each step, by the run that took it last, and what was written at the end."""
    taken: dict[int, dict[str, list[list[int]]]] = {}
    ends = []
    for file in sorted(folder.glob("rank-*"), key=lambda one: one.stat().st_mtime):
        size = file.name.split("-")[2]
        for line in map(json.loads, file.read_text().splitlines()):
            if isinstance(line, dict):
                ends.append(line)
            else:
                taken.setdefault(line[0], {}).setdefault(size, []).append(line[1])
    steps = {}
    for step, runs in sorted(taken.items()):
        of_ranks = list(runs.values())[-1]
        steps[step] = [number for its in of_ranks for number in its]
    return steps, ends
