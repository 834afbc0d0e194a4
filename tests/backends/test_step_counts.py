"""What a step adds to the raw library's own loop, on two ranks: counts, so no clock is involved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import run_workers

COUNTS = Path(__file__).parents[2] / "benchmarks" / "step_counts.py"

#: Python calls that a (micro-)batch may add, on every backend.
LIMIT = 30
#: How much torch's own calls may differ under DTensor, by what it has cached.
VARIES = 60

pytestmark = pytest.mark.dist


def counts(tmp_path: Path, backend: str) -> dict[str, Any]:
    """Return the counts of each row that is quick to measure; the benchmark has all of them."""
    target = tmp_path / "counts.json"
    arguments = ["--worker", backend, "--json", target, "--quick"]
    run_workers(COUNTS, 2, arguments, timeout=200, env={"OMP_NUM_THREADS": "1"}).checked()
    return json.loads(target.read_text())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed"])
def test_a_step_is_as_cheap_as_the_raw_loop(tmp_path: Path, backend: str) -> None:
    for title, row in counts(tmp_path, backend).items():
        print(backend, title, row)
        assert row["own"] / row["micro_batches"] <= LIMIT + 10, title
        slack = VARIES if backend == "fsdp2" else 10
        assert row["calls"] / row["micro_batches"] <= LIMIT + slack, title
        assert row["own growth"] <= 0, f"{title}: our calls grow with the model"
        assert row["growth"] <= VARIES, f"{title}: calls grow with the model"
        assert row["collectives"] <= 0, title
        assert row["reads"] <= 0, title
        assert row["copied growth"] <= 0, f"{title}: what is copied grows with the model"
        assert row["state_dicts"] == 0, f"{title}: a registered object was copied"
