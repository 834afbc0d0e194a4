"""Names that only the drop-in has, for scripts written for Accelerate, work."""

from __future__ import annotations

from pathlib import Path

import pool
import pytest
from support import case_names, check_case, clean_environment, run_workers

import accelerate_drop_in

HERE = Path(__file__).parent
#: The folder of the package `accelerate`.
SERVED = str(Path(accelerate_drop_in.__file__).with_name("served"))


def test_on_one_process(tmp_path: Path) -> None:
    environ = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=SERVED)
    done = pool.run([HERE / "names_worker.py", tmp_path], environ, 240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ended trackers_and_plugins_by_name" in done.stdout


@pytest.fixture(scope="module")
def run():
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_DEBUG_MODE": "1"}
    return run_workers(HERE / "names_ranks_worker.py", 2, timeout=120, env=environment)


@pytest.mark.dist
@pytest.mark.parametrize("case", case_names(HERE / "names_ranks_worker.py"))
def test_on_two_ranks(run, case):
    check_case(run, case)


def test_replaced_functions_and_imported_names() -> None:
    environ = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=SERVED)
    done = pool.run([HERE / "replaced_worker.py"], environ, 240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ended test_hyperparameters_of" in done.stdout
