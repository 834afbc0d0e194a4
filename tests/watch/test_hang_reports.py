"""A run with a stuck rank reports which rank it is, and where, before a timeout ends the run."""

from __future__ import annotations

import re
import signal

import pytest
from reports import HANG_AFTER, SCRIPT, started

pytestmark = pytest.mark.dist

#: What happens on the last rank -> lines of the report, with the rank as {0}.
CASES = {
    "sleep": [
        r"not there: rank {0}, whose last one is #\d+, all_reduce",
        r"Rank {0}, step 3 .*:\n(.*\n)+?.*in load_batch\n\s+time\.sleep\(60\)",
    ],
    "raise": [
        "The ranks call different collectives",
        r"all_reduce\(Float \[5\]\): rank",
        "barrier: rank {0}",
        r"Rank {0}, step 4 .*:\n(.*\n)+?\s+accelerator\.wait_for_everyone\(\)",
    ],
    "stop": [
        "not there: rank {0}, which is stopped by a signal",
        r"Rank {0}, last seen \d+ s ago at step [23] ",
    ],
    "gil": [
        "not there: rank {0}, which does not answer: its main thread keeps Python's global lock",
        r"Rank {0}, last seen \d+ s ago at step [23] .*:.*\n(.*\n)+?\s+sum\(range",
    ],
    "mismatch": [
        "The ranks call different collectives",
        r"all_reduce\(Float \[\d+\]\): rank",
        r"all_to_all\(Byte \[\d+\]\): rank {0}",
        r"Rank {0}, step 5 .*:\n(.*\n)+?\s+accelerator\.gather\(torch\.ones\(3\)\)",
    ],
    "shapes": [
        "a C\\+\\+ exception is about to abort the process",
        r"all_to_all\(Byte \[\d+\]\): rank",
        r"all_to_all\(Byte \[\d+\]\): rank {0}",
        r"(Rank {0}|Ranks 0(-|, ){0}), step 5",
    ],
}


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        *((how, 2) for how in CASES),
        # On four ranks, only the list of the others differs.
        *(pytest.param(how, 4, marks=[] if how == "sleep" else pytest.mark.soak) for how in CASES),
    ],
)
def test_stuck_rank_is_reported_with_its_step_and_place(how: str, ranks: int) -> None:
    with started(how, ranks) as run:
        said = run.until("accelerate-watch: ", quiet=2.0)
    for line in CASES[how]:
        assert re.search(line.format(ranks - 1), said), (
            f"{line.format(ranks - 1)!r} not in:\n{said}"
        )
    timed = re.search(r"has not completed for (\d+) s", said)
    assert how == "shapes" or (timed is not None and int(timed[1]) <= HANG_AFTER + 5), said
    if how in ("sleep", "stop", "gil"):
        others = "rank 0" if ranks == 2 else "ranks 0-2"
        assert f"all_reduce(Float [5]): {others}\n" in said
        stack = rf"{others.capitalize()}, step 3.*:\n(.*\n)+?\s+accelerator\.backward\(loss\)"
        assert re.search(stack, said), said


def test_slow_rank_is_named_with_its_place() -> None:
    with started("slow", 2, ACCELERATE_WATCH_STRAGGLER_INTERVAL="3") as run:
        said = run.until("accelerate-watch: ")
    assert "rank 1 is slow" in said
    assert re.search(rf"mostly at {SCRIPT} line \d+, in load_batch", said), said
    assert "rank 0 is slow" not in said


def test_signal_to_the_launcher_prints_a_report_and_the_run_continues() -> None:
    with started("wait", 2, ACCELERATE_WATCH_HANG_AFTER="60") as run:
        run.until("ready")
        run.process.send_signal(signal.SIGUSR2)
        said = run.until("accelerate-watch: ", quiet=2.0)
        assert run.process.poll() is None
    assert "a report was requested by SIGUSR2" in said
    assert re.search(r"Ranks 0, 1, step 5:\n(.*\n)+?\s+time\.sleep\(60\)", said), said


def test_signal_to_a_launch_of_one_process_prints_its_stacks_and_the_run_continues() -> None:
    with started("wait", 1) as run:
        run.until("ready")
        run.process.send_signal(signal.SIGUSR2)
        said = run.until("most recent call first", quiet=2.0)
        assert run.process.poll() is None
    assert re.search(rf'File "{SCRIPT}", line \d+ in main', said), said


def test_default_time_is_at_most_half_of_the_timeout() -> None:
    with started("wait", 2, ACCELERATE_WATCH_HANG_AFTER="") as run:
        assert "hang reports: a report is printed after 22.5 s in a collective" in run.until(
            "hang reports: "
        )
