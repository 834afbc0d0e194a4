"""`scheduler_steps` has the same effect on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import run_workers

HERE = Path(__file__).parent
#: What Hugging Face Accelerate does with each backend.
DEFAULTS = {
    "ddp": "per_process",
    "fsdp2": "per_process",
    "deepspeed": "per_step",
    "megatron": "per_step",
}

pytestmark = pytest.mark.dist


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("losses", "rates"):
        assert one[name] == pytest.approx(other[name], abs=1e-5), name


@pytest.mark.parametrize("backend", DEFAULTS)
def test_scheduler_follows_the_requested_rule(backend: str) -> None:
    arguments = [backend, HERE / "megatron"]
    run = run_workers(HERE / "scheduler_worker.py", 2, arguments, timeout=150).checked()
    found = run.results[0]
    same(found["per_process"], found["plain 2"])
    same(found["per_step"], found["plain 1"])
    default = DEFAULTS[backend]
    same(found["None"], found[default])
    assert f"scheduler_steps = '{default}'" in found["None"]["explained"][0]
    (line,) = found["None"]["said"]
    assert f"scheduler_steps='{default}'" in line
    moves = "2 steps, one for each process," if default == "per_process" else "one step"
    assert f"ExponentialLR moves {moves} whenever the optimizer steps" in line
    assert run.results[1]["None"]["said"] == []
    # The mean of the metric rises in every step, although it falls on rank 0.
    (rate, (line,)), (other, _) = (result["plateau"] for result in run.results)
    assert rate == other == pytest.approx(0.1 * 0.5**3)
    assert "ReduceLROnPlateau moves one step" in line
    assert "scheduler_metric='mean'" in line
