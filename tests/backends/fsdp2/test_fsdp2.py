"""FSDP2 on two and on four ranks. The cases are in the workers in this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import case_names, check_case, run_workers

HERE = Path(__file__).parent
CASES = [
    (worker, case)
    for worker in ("fsdp2_worker.py", "fsdp2_step_worker.py")
    for case in case_names(HERE / worker)
]

#: Slow cases that don't depend on the number of ranks only run on two.
ON_TWO = {
    "compiled_models_train_like_uncompiled_ones",
    "half_precision_trains_like_ddp",
    "options_for_memory_do_not_change_weights",
    "shards_can_be_merged_and_hooks_are_called",
    "unsupported_models_and_settings_are_rejected",
}
RUNS = [(2, *one) for one in CASES] + [(4, *one) for one in CASES if one[1] not in ON_TWO]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs():
    return {}


@pytest.mark.parametrize("case", case_names(HERE / "accelerate_names_worker.py"))
def test_functions_of_accelerate(runs, case):
    if "accelerate" not in runs:
        environment = {"OMP_NUM_THREADS": "1"}
        runs["accelerate"] = run_workers(
            HERE / "accelerate_names_worker.py", 2, timeout=120, env=environment
        )
    check_case(runs["accelerate"], case)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "worker", "case"), RUNS, ids=[f"{case}-{ranks}" for ranks, _, case in RUNS]
)
def test_case(runs, ranks, worker, case):
    if (worker, ranks) not in runs:
        environment = {"OMP_NUM_THREADS": "1"}
        only = [name for size, file, name in RUNS if (size, file) == (ranks, worker)]
        runs[worker, ranks] = run_workers(HERE / worker, ranks, only, timeout=300, env=environment)
    check_case(runs[worker, ranks], case)
