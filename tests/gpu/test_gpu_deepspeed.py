"""DeepSpeed on one rank, if it can be imported; each run is a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small import batches, net, plain

WORKER = Path(__file__).with_name("gpu_deepspeed_worker.py")


@pytest.mark.parametrize(("stage", "precision"), [(2, "no"), (2, "bf16"), (3, "bf16")])
def test_losses_match_plain_torch(
    device: torch.device, stage: int, precision: str, record_property: Any
) -> None:
    seen = subprocess.run(
        [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if seen.returncode:
        pytest.skip(
            f"deepspeed cannot be imported: {(seen.stderr.strip() or '?').splitlines()[-1]}"
        )
    record_property("deepspeed", seen.stdout.strip().splitlines()[-1])
    if device.type == "cpu" and precision != "no":
        pytest.skip("one precision is enough for a rehearsal")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(stage), precision, str(device)],
        env={**os.environ, "DS_ACCELERATOR": device.type},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    told = json.loads(line.removeprefix("TOLD"))
    assert told["engine"].startswith("DeepSpeed")
    tolerance = 1e-4 if precision == "no" else 3e-2
    losses = plain(net(device), batches(device))
    torch.testing.assert_close(
        torch.tensor(told["losses"]), torch.tensor(losses), rtol=tolerance, atol=tolerance
    )
