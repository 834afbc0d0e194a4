"""A failing rank quickly stops all processes, and its failure is shown last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import clean_environment

from accelerate_launch.devices import get_free_port

FAULTY = Path(__file__).with_name("faulty.py")
TIMEOUT = 120
SOON = 20

pytestmark = pytest.mark.dist


@dataclass
class Ended:
    """The outcome of a launch."""

    status: int
    output: str
    seconds: float
    folder: Path

    @property
    def summary(self) -> str:
        """The launcher's report at the end."""
        return self.output[self.output.rindex("\nRank ") :]

    def alive(self) -> list[int]:
        """Return the process IDs of ranks that still exist."""
        pids = [int(file.read_text()) for file in self.folder.glob("pid*")]
        return [pid for pid in pids if _exists(pid)]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def launch(folder: Path, fault: str, *options: str) -> Ended:
    command, environ = command_of(folder, fault, *options)
    start = time.monotonic()
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return Ended(done.returncode, done.stdout, time.monotonic() - start, folder)


def command_of(folder: Path, fault: str, *options: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "accelerate_core.cli", "launch", "--cpu", *options]
    return [*command, "--num_processes", "2", str(FAULTY), fault, str(folder)], clean_environment()


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("raise", "ValueError: in the middle"),
        ("exit", "exit status 3"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_failing_rank_stops_all_and_is_reported(tmp_path: Path, fault: str, shown: str) -> None:
    ended = launch(tmp_path, fault)
    assert ended.status != 0
    assert ended.seconds < SOON
    assert ended.summary.startswith("\nRank 1 on ")
    assert shown in ended.summary
    assert not ended.alive()
    assert not list(tmp_path.glob("done*"))


def test_rank_failing_at_the_start_stops_all(tmp_path: Path) -> None:
    ended = launch(tmp_path, "start")
    assert ended.status != 0
    assert ended.seconds < SOON
    assert ended.summary.startswith("\nRank 1 on ")
    assert "ValueError: at the start" in ended.output


def test_mismatched_tensors_stop_all_ranks(tmp_path: Path) -> None:
    ended = launch(tmp_path, "mismatch")
    assert ended.status != 0
    assert ended.seconds < SOON + 10
    assert not ended.alive()


def test_first_connection_error_is_shown(tmp_path: Path) -> None:
    ended = launch(tmp_path, "swallow")
    assert ended.seconds < SOON
    assert "this rank is the first to say so" in ended.output


def test_signal_to_the_launcher_stops_the_ranks(tmp_path: Path) -> None:
    command, environ = command_of(tmp_path, "hang")
    child = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        started = time.monotonic()
        while len(list(tmp_path.glob("pid*"))) < 2:
            assert time.monotonic() - started < 60
            time.sleep(0.2)
        time.sleep(0.5)
        child.terminate()
        child.wait(timeout=SOON)
    finally:
        child.kill()
        child.wait(timeout=SOON)
    assert not Ended(child.returncode, "", 0, tmp_path).alive()


def test_quiet_shows_only_the_first_failure_and_exits_with_its_status(tmp_path: Path) -> None:
    ended = launch(tmp_path, "exit", "--quiet")
    assert ended.status == 3
    assert "failed: exit status 3" in ended.summary
    assert "ChildFailedError" not in ended.output


@pytest.mark.parametrize("fault", ["raise", "kill"])
@pytest.mark.parametrize("how", ["standalone", "static"])
def test_restart_after_a_failure_succeeds(tmp_path: Path, fault: str, how: str) -> None:
    port = ["--main_process_port", str(get_free_port())] if how == "static" else []
    ended = launch(tmp_path, fault, "--max_restarts", "1", *port)
    assert ended.status == 0, ended.output
    assert sorted(file.name for file in tmp_path.glob("done*")) == ["done0.1", "done1.1"]
    assert ended.seconds < 2 * SOON
