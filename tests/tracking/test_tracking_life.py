"""Runs of whole scripts: killed and resumed, raising, on every rank, or with a tracker that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

WORKER = Path(__file__).with_name("tracking_worker.py")


def run(
    directory: Path,
    *arguments: str,
    rc: int = 0,
    slow: float = 0.0,
    launch: int = 0,
    warm: bool = True,
) -> str:
    """Run the worker; `warm=False` starts a real interpreter, for how one ends."""
    python = str(warm_python()) if warm else sys.executable
    command = [python, str(WORKER), *arguments]
    if launch:
        command[1:1] = ["-m", "accelerate_core", "launch", "--cpu", "--num_processes", str(launch)]
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "SLOW_SECONDS": str(slow), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


def slow_lines(directory: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in directory.glob("slow-*.txt")}


def jsonl_runs(directory: Path) -> list[list[dict[str, Any]]]:
    files = (directory / "project").glob("*/run.jsonl")
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


LOGGED = [f"log {step} {step + 0.5}" for step in range(20)]


@pytest.mark.parametrize("late", [False, True])
def test_killed_run_keeps_saved_values_and_is_continued(tmp_path: Path, late: bool) -> None:
    run(tmp_path, "killed", slow=0.2, rc=-signal.SIGKILL)
    ((name, before),) = slow_lines(tmp_path).items()
    # `save_state` waited for the earlier values. Only some of the later ones had arrived.
    assert LOGGED[:3] == before[1:4]
    assert len(before) < 15
    run(tmp_path, "resumed", *(["late"] if late else []))
    after = slow_lines(tmp_path)[name]
    assert [line for line in after if line.startswith("log")][len(before) - 1 :] == LOGGED[3:]
    assert after[-1] == "end finished"
    (rows,) = jsonl_runs(tmp_path)  # one run, not two
    steps = [row["step"] for row in rows if row["kind"] == "log"]
    assert steps[:3] == [0, 1, 2]
    assert steps[-17:] == list(range(3, 20))
    assert rows[-1]["status"] == "finished"


def test_script_that_raises_delivers_all_values_and_marks_the_run_failed(tmp_path: Path) -> None:
    text = run(tmp_path, "raises", slow=0.05, rc=1)
    assert "ValueError: the script is at fault" in text
    (lines,) = slow_lines(tmp_path).values()
    assert lines[1:] == [*LOGGED, "end failed"]
    (rows,) = jsonl_runs(tmp_path)
    assert rows[-1]["status"] == "failed"


def test_script_without_end_training_loses_nothing(tmp_path: Path) -> None:
    run(tmp_path, "ends", slow=0.05)
    (lines,) = slow_lines(tmp_path).values()
    assert lines[1:] == [*LOGGED, "end finished"]


@pytest.mark.dist
def test_tracker_on_every_rank_has_one_group(tmp_path: Path) -> None:
    run(tmp_path, "ranks", launch=2)
    lines = slow_lines(tmp_path)
    assert sorted(name.split("-")[1] for name in lines) == ["0", "1"]
    groups = {text[0] for text in lines.values()}
    assert len(groups) == 1
    assert groups.pop().startswith("group project-")
    assert sorted(text[1] for text in lines.values()) == ["log 0 0.0", "log 0 1.0"]
    assert len(jsonl_runs(tmp_path)) == 1  # jsonl ran on the main process only


@pytest.mark.dist
def test_run_is_marked_failed_when_another_rank_raises(tmp_path: Path) -> None:
    text = run(tmp_path, "one_rank_raises", launch=2, slow=0.1, rc=1)
    assert "rank 1 is at fault" in text
    (lines,) = slow_lines(tmp_path).values()
    assert lines[1:] == [*LOGGED, "end failed"]  # flushing took two seconds


def test_tracker_that_never_returns_is_given_up_and_the_others_finish(tmp_path: Path) -> None:
    text = run(tmp_path, "stuck")
    assert "received 0 of 20 entries and then made no progress. It loses the rest" in text
    (rows,) = jsonl_runs(tmp_path)
    assert [row["step"] for row in rows if row["kind"] == "log"] == list(range(20))
    assert rows[-1]["status"] == "finished"


def test_launcher_names_a_thread_that_a_tracker_left_running(
    tmp_path: Path,
) -> None:
    lines = [
        line for line in run(tmp_path, "lingers", warm=False).splitlines() if "Waiting for" in line
    ]
    assert lines == [
        "Waiting for threads: pump of __main__ (end_training() ends the threads of plugins)"
    ]
    assert "Waiting for" not in run(tmp_path, "ends")
