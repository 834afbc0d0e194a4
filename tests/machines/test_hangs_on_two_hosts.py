"""A stuck rank on another machine is reported with its step and place. The machines share no folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from following import Run
from two_hosts import needs_two_hosts, started

STUCK = Path(__file__).parents[1] / "watch" / "stuck.py"
#: Seconds after which these runs report a hang.
HANG_AFTER = 3

pytestmark = needs_two_hosts

#: What happens on the last rank, and the number of ranks -> lines of the report, with the rank as {0}.
CASES = {
    ("sleep", 4): [
        r"not there: rank {0}, whose last one is #\d+, all_reduce",
        r"Rank {0}, step 3 .*:\n(.*\n)+?.*in load_batch\n\s+time\.sleep\(60\)",
    ],
    ("stop", 4): [
        "not there: rank {0}, which is stopped by a signal",
        r"Rank {0}, last seen \d+ s ago at step 3 ",
    ],
    # No other rank on its machine can look why it does not answer.
    ("stop", 2): [
        "not there: rank {0}, which does not answer, and no other rank on its machine can say why",
        r"Rank {0}, last seen \d+ s ago at step 3 ",
    ],
}


@pytest.mark.parametrize(("how", "ranks"), CASES, ids=lambda value: str(value))
def test_stuck_rank_on_another_machine_is_reported(
    how: str, ranks: int, hosts: list[str], tmp_path: Path
) -> None:
    environ = []
    for host in hosts:
        (tmp_path / host).mkdir()
        its = {"TMPDIR": str(tmp_path / host), "ACCELERATE_WATCH_HANG_AFTER": str(HANG_AFTER)}
        environ.append(its)
    with started(hosts, STUCK, how, processes=ranks, environ=environ) as runs:
        said = Run(runs[0]).until("accelerate-watch: ", quiet=2.0)
    for line in CASES[how, ranks]:
        assert re.search(line.format(ranks - 1), said), f"{line!r} not in:\n{said}"
    timed = re.search(r"has not completed for (\d+) s", said)
    assert timed is not None
    assert int(timed[1]) <= HANG_AFTER + 5, said
    others = "Ranks 0-2" if ranks == 4 else "Rank 0"
    assert f"all_reduce(Float [5]): {others.lower()}\n" in said
    stack = rf"{others}, step 3.*:\n(.*\n)+?\s+accelerator\.backward\(loss\)"
    assert re.search(stack, said), said
