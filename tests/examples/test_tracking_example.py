"""The run of the tracking example can be shown on the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "tracking.py"


def run(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [warm_python(), *arguments], cwd=directory, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_runs_command_shows_the_values_of_the_example(tmp_path: Path, processes: int) -> None:
    launch = ("-m", "accelerate_core", "launch", "--cpu", "--num_processes", str(processes))
    run(tmp_path, *launch, str(EXAMPLE), "--log_with", "jsonl", "--epochs", "2", "--cpu")
    shown = run(tmp_path, "-m", "accelerate_core", "runs", "show", "tracking_output", "--json")
    (kept,) = json.loads(shown)
    assert kept["status"] == "finished"
    assert kept["config"]["epochs"] == 2
    steps = -(-1400 // (32 * processes)) * 2
    assert [step for step, _ in kept["curves"]["train/loss"]] == list(range(steps))
    assert kept["summary"]["train/loss"]["last"] < kept["curves"]["train/loss"][0][1]
    assert "artifacts/model.safetensors" in kept["files"]
    assert any(name.startswith("misread") for name in kept["files"])
