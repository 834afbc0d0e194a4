"""Loaders on two processes with gloo. The cases are in `data_worker.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pool
import pytest

WORKER = Path(__file__).with_name("data_worker.py")
CASES = re.findall(r"^def (case_\w+)", WORKER.read_text(), re.MULTILINE)
CASES += [f"{case}_ahead" for case in CASES if "_dispatch_" in case]
WORLD = 2


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        runs = list(threads.map(partial(run, folder), range(WORLD)))
    for done in runs:
        assert done.returncode == 0, done.stderr
    return [json.loads(done.stdout.splitlines()[-1]) for done in runs]


def run(folder: str, rank: int) -> subprocess.CompletedProcess[str]:
    command = [WORKER, str(rank), str(WORLD), f"{folder}/store"]
    return pool.run(command, os.environ, 180, rank=rank)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    for rank, result in enumerate(results):
        assert result[case] == "ok", f"rank {rank}:\n{result[case]}"
