"""A backend derived from fsdp2 that also divides layers over the ranks of `pp`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, clean_environment, run_workers

WORKER = Path(__file__).with_name("pipeline_worker.py")


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_stages_train_like_one_process(ranks: int, tmp_path: Path) -> None:
    info = tmp_path / "pipelined-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pipelined\nVersion: 1.0\n")
    entry = "[accelerate_core.backends]\npipelined_fsdp2 = pipeline_worker:PipelinedFSDP2\n"
    (info / "entry_points.txt").write_text(entry)
    path = f"{tmp_path}:{WORKER.parent}:{clean_environment()['PYTHONPATH']}"
    run = run_workers(WORKER, ranks, timeout=120, env={"PYTHONPATH": path})
    for name in case_names(WORKER):
        check_case(run, name)
