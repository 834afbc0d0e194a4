"""Resume with megatron after a kill, with another layout, and from damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_workers

HERE = Path(__file__).parent
TP = {"sizes": {"tp": 2}}
PP = {"sizes": {"pp": 2}, "num_micro_batches": 2}
SHARDED = {"sizes": {"dp_shard": 2}, "use_distributed_optimizer": True}
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.dist


def start(folder, layout, until, kill=0):
    arguments = [json.dumps(layout), folder, until, kill]
    worker = HERE / "resume_worker.py"
    return run_workers(worker, 2, arguments, timeout=200, env=ENVIRONMENT)


def losses(folder):
    lines = (folder / "losses.txt").read_text().splitlines()
    return {int(step): float(loss) for step, loss in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    start(folder, TP, 14).checked()
    return losses(folder)


@pytest.mark.timeout(400)
def test_a_run_killed_while_saving_resumes_with_the_same_losses(tmp_path, straight):
    killed = start(tmp_path, TP, 14, kill=7)
    assert killed.returncode != 0
    start(tmp_path, TP, 14).checked()
    assert losses(tmp_path) == straight


@pytest.mark.timeout(400)
def test_a_run_resumes_on_other_layouts(tmp_path, straight):
    for until, layout in ((6, TP), (10, PP), (14, SHARDED)):
        start(tmp_path, layout, until).checked()
    found = losses(tmp_path)
    assert found.keys() == straight.keys()
    for step, loss in straight.items():
        assert abs(found[step] - loss) <= 1e-5, (step, loss, found[step])


@pytest.mark.timeout(400)
def test_another_layout_cannot_load_accumulated_gradients(tmp_path):
    start(tmp_path, TP, 5).checked()
    refused = start(tmp_path, PP, 10)
    assert not refused.ok
    assert "in the middle of an accumulation cycle" in refused.stderr
    assert "cannot move its gradients to 2 process(es) (pp=2)" in refused.stderr


@pytest.mark.timeout(400)
def test_every_damaged_file_is_rejected(tmp_path):
    start(tmp_path, TP, 5).checked()
    arguments = [json.dumps(TP), tmp_path]
    worker = HERE / "damage_worker.py"
    tried = run_workers(worker, 2, arguments, timeout=300, env=ENVIRONMENT).checked().results[0]
    assert {"backend_megatron/.metadata", "backend_megatron/__1_0.distcp"} <= set(tried)
    assert {"backend_megatron/plain.json", "manifest.json"} <= set(tried)
