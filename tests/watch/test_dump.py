"""`accelerate-core dump` prints a report of a running job."""

from __future__ import annotations

import re
import signal
import time

import psutil
import pytest
from launched import run_cli
from reports import SCRIPT, started


@pytest.mark.dist
def test_dump_prints_the_report_of_a_job_named_by_launcher_or_rank() -> None:
    with started("wait", 2, ACCELERATE_WATCH_HANG_AFTER="60") as run:
        run.until("ready")
        listed = run_cli("dump", forked=True).stdout
        assert f"{run.process.pid}: {SCRIPT}, ranks 0, 1" in listed
        rank = psutil.Process(run.process.pid).children()[0].pid
        for job in (run.process.pid, rank):
            done = run_cli("dump", str(job), forked=True)
            assert done.returncode == 0, done.stderr
            assert re.search(r"Ranks 0, 1, step 5:\n(.*\n)+?\s+time\.sleep\(60\)", done.stdout)
    until = time.monotonic() + 20
    while (
        f"{run.process.pid}:" in run_cli("dump", forked=True).stdout
    ):  # killed ranks take a moment to end
        assert time.monotonic() < until, "the job is still listed"


@pytest.mark.dist
def test_dump_sends_no_signal_that_the_script_handles() -> None:
    with started("handler", 2, ACCELERATE_WATCH_HANG_AFTER="60") as run:
        run.until("ready")
        done = run_cli("dump", str(run.process.pid), forked=True)
        assert done.returncode == 0, done.stderr
        assert "a report was requested by accelerate-core dump" in done.stdout
        run.process.send_signal(signal.SIGUSR2)
        said = run.until("the script's handler", quiet=3.0)
        assert run.process.poll() is None
    assert said.count("the script's handler") == 2, said  # one for each rank


def test_dump_refuses_another_process() -> None:
    done = run_cli("dump", "1", forked=True)
    assert done.returncode == 1
    assert "JOB='1' is neither the process ID of a launcher on this machine nor of" in done.stderr
