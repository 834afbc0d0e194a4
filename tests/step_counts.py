"""What a step adds to the raw library's own loop, on two ranks: counts, so no clock is involved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import run_workers

COUNTS = Path(__file__).parents[1] / "benchmarks" / "step_counts.py"

#: Python calls that an optimizer step may add.
LIMIT = 30
#: Of one of four micro-batches: entering the block, and reading, is done in each of them.
MICRO_BATCH_LIMIT = 21
#: How much torch's own calls may differ under DTensor, by what it has cached.
VARIES = 60


def counts(tmp_path: Path, backend: str) -> dict[str, Any]:
    """Return the counts of each row that is quick to measure; the benchmark has all of them."""
    target = tmp_path / "counts.json"
    arguments = ["--worker", backend, "--json", target, "--quick"]
    more = [backend] * (backend == "deepspeed")
    environment = {"OMP_NUM_THREADS": "1"}
    run_workers(COUNTS, 2, arguments, timeout=200, env=environment, more=more).checked()
    return json.loads(target.read_text())


def check_counts(tmp_path: Path, backend: str) -> None:
    """Assert that a step of this backend costs what the raw loop costs, whatever the model."""
    rows = counts(tmp_path, backend)
    assert rows
    for title, row in rows.items():
        print(backend, title, row)
        varies = VARIES if backend == "fsdp2" else 0
        limit = LIMIT
        if row["micro_batches"] > 1:
            limit = MICRO_BATCH_LIMIT * row["micro_batches"]
        assert row["calls"] <= limit + varies, title
        assert row["own growth"] <= 0, f"{title}: our calls grow with the model"
        assert row["growth"] <= varies, f"{title}: calls grow with the model"
        # GradScaler under FSDP2 reduces the overflow flag over the ranks once.
        assert row["collectives"] <= (backend == "fsdp2" and "fp16" in title), title
        assert row["reads"] <= 0, title
        assert row["copied growth"] <= 0, f"{title}: what is copied grows with the model"
        assert row["state_dicts"] == 0, f"{title}: a registered object was copied"
