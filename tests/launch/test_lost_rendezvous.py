"""An agent gives up on a silent rendezvous, but not while waiting is justified."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from accelerate_launch import lost_rendezvous
from accelerate_launch.lost_rendezvous import LostRendezvous


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(lost_rendezvous, "PATIENCE", 0.2)
    return []


def wait(left: list[int], seconds: float) -> list[int]:
    until = time.monotonic() + seconds
    while not left and time.monotonic() < until:
        time.sleep(0.02)
    return left


def test_silent_rendezvous_stops_the_agent_once_a_rank_has_ended(
    left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    rank = subprocess.Popen([sys.executable, "-c", ""])
    watch = LostRendezvous("10.0.0.1:29500", left.append)
    watch.waiting()
    assert wait(left, 10) == [1]
    assert "10.0.0.1:29500 has not answered" in capsys.readouterr().err
    rank.wait()


def test_agent_waits_while_its_ranks_run(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    # Earlier tests may have left other children of this process.
    monkeypatch.setattr(
        "accelerate_launch.lost_rendezvous._ranks", lambda: [psutil.Process(rank.pid)]
    )
    watch = LostRendezvous("there", left.append)
    watch.waiting()
    assert wait(left, 1) == []
    watch.answered()
    watch.waiting(0.3)
    assert wait(left, 5) == [1]
    rank.wait()


def test_answers_in_time_keep_the_agent_running(left: list[int]) -> None:
    watch = LostRendezvous("there", left.append)
    for _ in range(10):
        watch.waiting(0.5)
        time.sleep(0.1)
        watch.answered()
    assert wait(left, 1) == []
