"""Checks what a training step adds to the raw library's loop on two ranks, by counts and not times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import run_workers

COUNTS = Path(__file__).parents[1] / "benchmarks" / "step_counts.py"

#: Python calls that an optimizer step may add.
LIMIT = 30
#: The same for each micro-batch of a cycle, because each one is read and enters `accumulate`.
MICRO_BATCH_LIMIT = 21
#: Difference in the number of calls inside DTensor, which depends on caches of torch.
VARIES = 60


def counts(tmp_path: Path, backend: str) -> dict[str, Any]:
    """Return the counts of the rows that can be measured quickly. The benchmark has more rows."""
    target = tmp_path / "counts.json"
    arguments = ["--worker", backend, "--json", target, "--quick"]
    more = [backend] * (backend == "deepspeed")
    environment = {"OMP_NUM_THREADS": "1"}
    run_workers(COUNTS, 2, arguments, timeout=200, env=environment, more=more).checked()
    return json.loads(target.read_text())


def check_counts(tmp_path: Path, backend: str) -> None:
    """Assert that a step of this backend adds only a few calls, independent of the model's size."""
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
        # With FSDP2, GradScaler reduces the overflow flag over the ranks once.
        assert row["collectives"] <= (backend == "fsdp2" and "fp16" in title), title
        assert row["reads"] <= 0, title
        assert row["copied growth"] <= 0, f"{title}: the copied bytes grow with the model"
        assert row["state_dicts"] == 0, f"{title}: a registered object was copied"
