"""With the same seed, each rank reads the same samples in the same order as with Accelerate 1.15.

`orders.py` recorded `orders.json` with Accelerate.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("orders.py")
RECORDED = json.loads(WORKER.with_suffix(".json").read_text())

pytestmark = pytest.mark.dist


def differs(name: str, world: int) -> str:
    """Return how a case differs from the recorded order, or "" if it doesn't."""
    words = name.split()
    if "uneven" in words and "drop" not in words and ("dispatch" in words or "stream" in words):
        return "the original fills up although even_batches=False"
    if name == "dispatch uneven batches":
        return "the original loses samples of batches that cannot be divided"
    if name == "dispatch own generator" and world == 1:
        return "a single process reads the plain loader"
    return ""


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_samples_are_read_in_the_same_order_as_with_accelerate(world: int, tmp_path: Path) -> None:
    run_workers(WORKER, world, timeout=300, env={"ORDERS": str(tmp_path)}).checked()
    here = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(world)]
    assert here[0].keys() == RECORDED.keys()
    wrong = {}
    for name, lines in RECORDED.items():
        expected, found = lines[str(world)], [of_rank[name] for of_rank in here]
        # Without a full batch, Accelerate fails.
        same = found == expected or "TypeError" in expected or bool(differs(name, world))
        if not same or any("Error" in line for line in found):
            wrong[name] = (expected, found)
    assert not wrong
