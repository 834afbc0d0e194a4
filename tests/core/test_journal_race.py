"""Ranks that begin and end their trackers at any time share one folder of journals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import clean_environment

RANK = """
import sys
from pathlib import Path
from accelerate_core.tracking.journal import Journal, read_leftover

folder, rank, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(times):
    journal = Journal(folder, f"run{number}", rank)
    journal.watch(["one"])
    journal.append(0, {"value": number})
    assert [entry["value"] for entry in read_leftover(folder, f"run{number}", rank).entries] == [number]
    read_leftover(folder, "another", rank)
    journal.mark("one", 0)
    journal.close(delete=True)
"""


def race(folder: Path, times: int) -> None:
    command = [sys.executable, "-c", RANK, str(folder / ".tracking")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(times)],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert not (folder / ".tracking").exists()


def test_one_may_remove_the_folder_while_another_writes(tmp_path: Path) -> None:
    race(tmp_path, 100)


@pytest.mark.soak
def test_so_a_hundred_times(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        race(folder, 20)
