"""Resuming with FSDP2: with other numbers of ranks and other meshes, and after damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("resume_worker.py")

pytestmark = pytest.mark.dist


def run(folder: Path, *stages: tuple[int, dict[str, int], int]) -> dict[int, float]:
    """Return the loss of each micro-batch. If one was trained twice, the later loss counts."""
    folder.mkdir()
    for ranks, sizes, until in stages:
        arguments = [json.dumps(sizes), folder, until]
        run_workers(WORKER, ranks, arguments, timeout=120, env={"OMP_NUM_THREADS": "1"}).checked()
    lines = (folder / "losses.txt").read_text().splitlines()
    return {int(step): float(loss) for step, loss in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("all") / "straight", (1, {}, 30))


@pytest.mark.parametrize(
    "stages",
    [
        [(2, {"dp_shard": 2}, 8), (4, {"dp_shard": 4}, 16), (1, {}, 30)],
        [(4, {"dp_shard": 2, "tp": 2}, 10), (4, {"dp_shard": 4}, 30)],
        # In the middle of a cycle and of an epoch.
        [(2, {"dp_shard": 2}, 15), (2, {"tp": 2}, 30)],
        [(1, {}, 15), (2, {"tp": 2}, 30)],
    ],
    ids=["2-4-1", "2x2 with tp to 4", "in mid cycle, to tp", "in mid cycle, from one rank to tp"],
)
def test_run_resumes_with_other_numbers_of_ranks_and_meshes(tmp_path, straight, stages):
    found = run(tmp_path / "run", *stages)
    assert found.keys() == straight.keys()
    for step, loss in straight.items():
        assert abs(found[step] - loss) <= 1e-5, (step, loss, found[step])


def test_damaged_checkpoint_is_rejected_by_name_and_skipped(tmp_path):
    folder = tmp_path / "run"
    run(folder, (2, {"dp_shard": 2}, 4), (2, {"dp_shard": 2}, 8))
    worker = Path(__file__).with_name("damage_worker.py")
    result = run_workers(worker, 2, [folder], timeout=200, env={"OMP_NUM_THREADS": "1"}).checked()
    tried = result.results[0]
    names = {name for name, _ in tried}
    assert {"backend_fsdp2/.metadata", "backend_fsdp2/__1_0.distcp", "manifest.json"} <= names
    assert len(tried) == 4 * len(names)
    assert os.path.isdir(folder / "checkpoints" / "checkpoint_1")
