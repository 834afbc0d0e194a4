"""Ranks that begin and end their trackers at any time share one folder of journals."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

pytestmark = pytest.mark.dist


def race(folder: Path, times: int, timeout: float) -> None:
    worker = Path(__file__).with_name("journal_race_worker.py")
    run_workers(worker, 2, [folder / ".tracking", times], timeout=timeout).checked()
    assert not (folder / ".tracking").exists()


def test_one_may_remove_the_folder_while_another_writes(tmp_path: Path) -> None:
    race(tmp_path, 100, timeout=120)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_so_a_hundred_times(tmp_path: Path) -> None:
    race(tmp_path, 100 * 100, timeout=1400)
