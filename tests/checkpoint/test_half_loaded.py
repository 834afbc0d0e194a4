"""A load_state that fails changes nothing, and names the file and the object on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("half_loaded_worker.py")


@pytest.mark.parametrize(("backend", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_failed_load_changes_nothing(tmp_path: Path, backend: str, ranks: int) -> None:
    result = run_workers(WORKER, ranks, [tmp_path, backend], timeout=200).checked()
    assert result.results == [{}] * ranks
