"""`accelerate-core dump` prints a report of a running job."""

from __future__ import annotations

import re
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


def test_dump_refuses_another_process() -> None:
    done = run_cli("dump", "1", forked=True)
    assert done.returncode == 1
    assert "JOB='1' is neither the process ID of a launcher on this machine nor of" in done.stderr
