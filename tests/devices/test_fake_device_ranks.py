"""Two ranks with a fake device each."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_testing import run_workers
from accelerate_testing.fake_device import build

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.needs("torch>=2.13")
@pytest.mark.parametrize("backend", ["ddp"])
def test_ranks_train_without_waiting_and_resume(backend: str, tmp_path: Path) -> None:
    build.compiled()  # before the time limit starts
    run = run_workers(WORKER, 2, [backend, tmp_path], timeout=240).checked()
    for rank, found in enumerate(run.results):
        assert found["device"] == f"fake:{rank}"
        assert found["waits"] == []
        assert found["races"] == []
        assert found["collectives"] > 0
        assert found["drawn"] == run.results[0]["drawn"]
        assert found["again"] == pytest.approx(found["first"])
