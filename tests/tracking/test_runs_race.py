"""Ranks can start and end their runs in one folder at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_workers

pytestmark = pytest.mark.dist


def race(folder: Path, times: int, timeout: float) -> None:
    worker = Path(__file__).with_name("runs_race_worker.py")
    run_workers(worker, 2, [folder, times], timeout=timeout).checked()
    lines = [json.loads(line) for file in folder.rglob("*.jsonl") for line in file.open()]
    logged = sorted(line["values"]["value"] for line in lines if "value" in line.get("values", ()))
    assert logged == sorted(2 * list(range(times)))


def test_ranks_can_start_and_end_runs_in_one_folder(tmp_path: Path) -> None:
    race(tmp_path, 30, timeout=120)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_ranks_can_start_and_end_runs_a_hundred_times_as_often(tmp_path: Path) -> None:
    race(tmp_path, 30 * 100, timeout=1400)
