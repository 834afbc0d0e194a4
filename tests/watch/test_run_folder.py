"""The folder that the ranks of a run on one machine share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from accelerate_watch import commands, run_folder

COME_AND_GO = """
import sys
from accelerate_watch import run_folder
rank = int(sys.argv[1])
for number in range(300):
    folder = run_folder.create(rank)
    (folder / f"rank{rank}.stacks").write_text("")
    run_folder.leave(folder, rank)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_rank_may_start_while_another_one_ends(temporary: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", COME_AND_GO, str(rank)], stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()
    assert not list(temporary.glob("accelerate-watch-*/*"))


def test_the_last_rank_removes_the_files_of_killed_ranks(temporary: Path) -> None:
    folder = run_folder.create(0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=60)
    (folder / "rank1.json").write_text(json.dumps({"pid": ended.pid, "rank": 1, "script": "x"}))
    (folder / "rank1.beat").write_text("0 0")
    (folder / "report1.txt").write_text("a report")
    assert [one["rank"] for one in run_folder.running()[os.getppid()]] == [0]
    run_folder.leave(folder, 0)
    assert not folder.exists()


RUN_UNTIL_KILLED = """
import time
from accelerate_watch import run_folder
run_folder.create(0)
print("ready", flush=True)
time.sleep(60)
"""


def killed_run() -> Path:
    """Return the file of a rank that was killed, whose launcher is this process."""
    rank = subprocess.Popen([sys.executable, "-c", RUN_UNTIL_KILLED], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"ready\n"
    file = run_folder.folder_of(os.getpid()) / "rank0.json"
    assert [one["pid"] for one in run_folder.running()[os.getpid()]] == [rank.pid]
    rank.kill()
    rank.wait(timeout=60)
    rank.stdout.close()
    return file


def test_a_process_that_has_the_id_of_a_killed_rank_is_neither_listed_nor_signalled(
    temporary: Path,
) -> None:
    file = killed_run()
    facts = json.loads(file.read_text())
    other = subprocess.Popen(["sleep", "60"])
    try:
        file.write_text(json.dumps({**facts, "pid": other.pid}))
        done = CliRunner().invoke(commands.command, [str(os.getpid())])
        assert done.exit_code == 1
        assert "Running jobs: none." in done.output
        time.sleep(0.2)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(timeout=60)
    assert not file.parent.exists()


def test_ranks_of_another_pid_namespace_are_not_listed_but_keep_their_files(
    temporary: Path,
) -> None:
    folder = run_folder.create(0)
    file = folder / "rank0.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "namespace": facts["namespace"] + 1}))
    assert run_folder.running() == {}
    assert not run_folder.has_rank(folder, 0, os.getpid())
    assert file.exists()
    run_folder.leave(folder, 0)


def test_an_accelerator_that_is_deleted_late_keeps_the_files_of_the_next_one(
    temporary: Path,
) -> None:
    first = run_folder.create(0)
    second = run_folder.create(0)
    assert first == second
    run_folder.leave(first, 0)
    (second / "rank0.stacks").write_text("")
    assert run_folder.running()[os.getppid()][0]["pid"] == os.getpid()
    run_folder.leave(second, 0)
    assert not second.exists()
