"""Resuming with DeepSpeed: bit for bit, with other numbers of ranks, and after damage."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import support

HERE = Path(__file__).parent
STAGES = ("1", "2", "3")
run_workers = partial(support.run_workers, more=("deepspeed",))

pytestmark = pytest.mark.dist


def run(
    folder: Path,
    *starts: tuple[int, int],
    stages: tuple[str, ...] = STAGES,
    precision: str = "no",
) -> dict[str, dict[int, float]]:
    """Train, and return the loss of each micro-batch for each stage.

    Args:
        starts: number of ranks, and the micro-batch at which to stop.
    """
    folder.mkdir(exist_ok=True)
    for ranks, until in starts:
        worker = HERE / "deepspeed_resume_worker.py"
        environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": precision}
        arguments = [folder, until, *stages]
        run_workers(worker, ranks, arguments, timeout=200, env=environment).checked()
    found = {}
    for stage in stages:
        lines = (folder / stage / "losses.txt").read_text().splitlines()
        found[stage] = {int(step): float(loss) for step, loss in (line.split() for line in lines)}
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"), (2, 16))


def test_same_number_of_ranks_resumes_bit_for_bit(tmp_path, straight):
    # Stopped in the middle of a cycle, and at the end of a cycle in the middle of an epoch.
    assert run(tmp_path, (2, 5), (2, 14), (2, 16)) == straight


@pytest.mark.timeout(500)
def test_fp16_resumes_bit_for_bit(tmp_path):
    stages = ("0", *STAGES)
    found = [
        run(tmp_path / name, *starts, stages=stages, precision="fp16")
        for name, starts in (("straight", [(2, 10)]), ("stopped", [(2, 5), (2, 10)]))
    ]
    assert found[0] == found[1]


def test_fp16_resumes_closely_with_another_number_of_ranks(tmp_path, straight):
    found = run(tmp_path, (2, 6), (1, 10), precision="fp16")
    for stage, losses in found.items():
        for step, loss in losses.items():
            assert abs(straight[stage][step] - loss) <= 1e-2, (stage, step, loss)


def test_loss_scale_is_kept_with_another_number_of_ranks(tmp_path):
    for ranks in (2, 1):
        worker, environment = HERE / "deepspeed_scale_worker.py", {"OMP_NUM_THREADS": "1"}
        result = run_workers(worker, ranks, [tmp_path], timeout=150, env=environment).checked()
        assert result.results == [{stage: [128, 2] for stage in STAGES}] * ranks


def test_other_numbers_of_ranks_resume_closely(tmp_path, straight):
    found = run(tmp_path, (1, 6), (2, 10), (1, 16))
    for stage, losses in straight.items():
        assert found[stage].keys() == losses.keys()
        for step, loss in losses.items():
            assert abs(found[stage][step] - loss) <= 1e-5, (stage, step, loss, found[stage][step])


def test_gradients_of_a_cycle_are_rejected_with_another_number_of_ranks(tmp_path):
    run(tmp_path, (2, 5), stages=("2",))
    worker = HERE / "deepspeed_resume_worker.py"
    result = run_workers(worker, 1, [tmp_path, 10, "2"], timeout=150)
    assert not result.ok
    assert "in the middle of an accumulation cycle on 2 process(es)" in result.stderr
    assert "cannot move its gradients to 1 process(es)" in result.stderr


def test_damaged_checkpoint_is_rejected_by_name_and_skipped(tmp_path):
    run(tmp_path, (2, 4), (2, 8), stages=("2",))
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    worker = HERE.parent / "fsdp2" / "damage_worker.py"
    arguments = [tmp_path / "2", "deepspeed"]
    result = run_workers(worker, 2, arguments, timeout=250, env=environment).checked()
    tried = result.results[0]
    names = {name for name, _ in tried}
    engine = "backend_deepspeed/engine_0"
    assert f"{engine}/mp_rank_00_model_states.pt" in names
    assert f"{engine}/zero_pp_rank_1_mp_rank_00_optim_states.pt" in names
    assert len(tried) == 4 * len(names)
    assert os.path.isdir(tmp_path / "2" / "checkpoints" / "checkpoint_1")
