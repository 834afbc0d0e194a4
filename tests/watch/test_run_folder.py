"""The folder that the ranks of a run on one machine share."""

from __future__ import annotations

import getpass
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from accelerate_core.plugin import PluginError
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
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
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


def squat(folder: Path, kind: str, victim: Path) -> None:
    """Take the name of the folder of all runs, as another user of the machine could."""
    if kind == "link":
        folder.symlink_to(victim)
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o777)
        os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("kind", ["link", "file", "another user's"])
def test_folder_that_another_user_created_is_not_used(temporary: Path, kind: str) -> None:
    if os.getuid() and kind == "another user's":
        pytest.skip("only root can give a folder to another user")
    victim = temporary / "victim"
    victim.mkdir()
    name = f"accelerate-watch-{getpass.getuser()}"
    squat(temporary / name, kind, victim)
    folder = run_folder.create(0)
    assert folder.parent == temporary / f"{name}-2"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert list(run_folder.running()) == [os.getppid()]
    assert run_folder.folder_of(os.getppid()) == folder
    assert not list(victim.iterdir())
    run_folder.leave(folder, 0)


def test_run_fails_with_advice_if_all_names_are_taken(temporary: Path) -> None:
    name = f"accelerate-watch-{getpass.getuser()}"
    for suffix in ("", *(f"-{number}" for number in range(2, 11))):
        squat(temporary / f"{name}{suffix}", "file", temporary)
    with pytest.raises(PluginError, match="Set XDG_RUNTIME_DIR"):
        run_folder.create(0)


def test_runtime_directory_comes_first_and_is_found_without_the_variable(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = temporary / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder = run_folder.create(0)
    assert folder.parent.parent == runtime
    assert list(run_folder.running()) == [os.getppid()]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary / "does not exist"))
    other = run_folder.create(1)
    assert other.parent.parent == temporary
    run_folder.leave(folder, 0)
    run_folder.leave(other, 1)


def test_links_in_the_folder_are_not_followed(temporary: Path) -> None:
    victim = temporary / "victim"
    victim.write_text("precious")
    folder = run_folder.create(0)
    (folder / "rank0.beat").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        run_folder.write_beat(folder, 0, 3)
    assert victim.read_text() == "precious"
    run_folder.leave(folder, 0)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": "x", "rank": 1, "script": ""}', "[" * 9999]
)
def test_damaged_file_is_named_and_ignored(
    temporary: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    folder = run_folder.create(0)
    (folder / "rank7.json").write_text(text)
    (folder.parent / "12notes").mkdir()
    done = CliRunner().invoke(commands.command, [])
    assert done.exit_code == 0, done.output
    assert "ranks 0" in done.output
    assert f"{folder / 'rank7.json'} is damaged" in caplog.text
    run_folder.leave(folder, 0)
