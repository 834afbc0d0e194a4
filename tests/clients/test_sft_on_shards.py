"""TRL's SFTTrainer with a PEFT adapter on the drop-in, with frozen weights sharded by FSDP2.

Accelerate has no FSDP on the CPU, so the results are compared with those of one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients import needs_environment, run_worker

pytestmark = needs_environment


def train(folder: Path, ranks: int, kind: str) -> dict[str, Any]:
    folder.mkdir()
    run_worker("sft_on_shards_worker.py", ranks, folder, kind, ACCELERATE_USE_CPU="true")
    result: dict[str, Any] = json.loads((folder / f"{kind}.json").read_text())
    return result


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "loss", "adapter"),
    [("lora", 1e-5, 1e-5), pytest.param("qlora", 1e-3, 4e-3, marks=pytest.mark.soak)],
)
def test_sft_on_shards_equals_one_process_and_resumes_exactly(
    kind: str, loss: float, adapter: float, tmp_path: Path
) -> None:
    """Allow a difference of `loss` and `adapter`. For QLoRA, TRL converts the adapter to bf16."""
    one, two = (train(tmp_path / str(ranks), ranks, kind) for ranks in (1, 2))
    assert two["sharded"]
    assert two["bytes"] <= 0.51 * one["bytes"]
    assert len(two["losses"]) == 4
    assert two["losses"] == pytest.approx(one["losses"], abs=loss)
    assert two["norms"] == pytest.approx(one["norms"], rel=loss)
    assert two["adapters"].keys() == one["adapters"].keys()
    for name, values in two["adapters"].items():
        assert values == pytest.approx(one["adapters"][name], abs=adapter), name
    assert two["resumed"]
