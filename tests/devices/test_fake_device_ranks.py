"""Two ranks with a fake device each train like one process, and the host never waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

from accelerate_testing.fake_device import build

WORKER = Path(__file__).with_name("ranks_worker.py")


STEPS = 8


@pytest.mark.needs("torch>=2.13")
@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("ddp", "no"),
        ("ddp", "bf16"),
        ("ddp", "fp16"),
        ("fsdp2", "no"),
        ("fsdp2", "bf16"),
        ("fsdp2", "fp16"),
    ],
)
def test_ranks_train_without_waiting_and_resume(
    backend: str, precision: str, tmp_path: Path
) -> None:
    build.compiled()  # before the time limit starts
    run = run_workers(WORKER, 2, [backend, precision, tmp_path], timeout=240).checked()
    for rank, found in enumerate(run.results):
        assert found["device"] == f"fake:{rank}"
        tolerance = 1e-5 if precision == "no" else 0.01
        assert found["trained"] == pytest.approx(found["expected"], rel=tolerance)
        if precision == "fp16":  # torch's GradScaler reads once per step
            assert len(found["waits"]) == STEPS
            assert all("read item" in wait for wait in found["waits"])
        else:
            assert found["waits"] == []
        assert found["races"] == []
        assert found["collectives"] > 0
        assert found["drawn"] == run.results[0]["drawn"]
        assert found["again"] == pytest.approx(found["first"])
