"""Ranks that are configured differently are named at once, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import run_workers

from accelerate_core.distributed.process import _differences

WORKER = Path(__file__).with_name("digest_worker.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("", "", ""),
        (
            "ACCELERATE_MIXED_PRECISION=bf16",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4",
            "precision is 'bf16 (accelerate-core 0.1.0)' on rank 0, 'no (accelerate-core 0.1.0)' on rank 1",
        ),
        (
            "ACCELERATE_DDP_BUCKET_CAP_MB=3",
            "",
            "ddp.bucket_cap_mb is 3 on rank 0, 25 on rank 1",
        ),
    ],
)
def test_ranks_compare_what_they_run(first: str, second: str, said: str) -> None:
    run = run_workers(WORKER, 2, timeout=90, env={"ONLY_0": first, "ONLY_1": second}).checked()
    for kind, text, seconds in run.results:
        assert kind == ("ConfigurationError" if said else "fine")
        assert said in text
        assert seconds < 20


def test_many_differences_are_counted_not_listed() -> None:
    reference = {f"k{i}": i for i in range(9)}
    text = _differences(reference, {1: {}})
    assert text.count("on rank 1") == 5
    assert text.endswith("and 4 more.")
    assert _differences(reference, {1: dict(reference)}) == ""
