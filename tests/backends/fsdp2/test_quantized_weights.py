"""Adapters on frozen quantized weights train on FSDP2 as on one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import run_workers

WORKER = Path(__file__).with_name("quantized_weights_worker.py")

pytestmark = [pytest.mark.dist, pytest.mark.needs("torchao>=0.18")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "share"), [("nf4", 0.55), ("int8", 1.0)])
def test_adapters_equal_one_process_and_frozen_weights_do_not_change(
    kind: str, share: float, tmp_path: Path
) -> None:
    """`share` is the largest part of the frozen weights that a rank may hold."""
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        done = run_workers(
            WORKER,
            ranks,
            [kind, out],
            timeout=180,
            env={"OMP_NUM_THREADS": "1"},
            more=("torchao.quantization",),
        ).checked()
        warned = "2 frozen weights of Sequential, such as '0.base.weight'" in done.stderr
        assert warned == (ranks == 2 and kind == "int8")
        results.append(json.loads(out.read_text()))
    one, two = results
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    for ours, theirs in zip(two["adapters"], one["adapters"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert one["unchanged"]
    assert two["unchanged"]
    assert one["resumed"]
    assert two["resumed"]
    for result in results:
        assert "save_model can't write '0.base.weight'" in result["refused"]
        assert "save_pretrained" in result["refused"]
    assert two["bytes"] <= share * one["bytes"]
