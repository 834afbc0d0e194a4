"""Megatron on one rank, if it can be imported; each run is a separate process."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("gpu_megatron_worker.py")
VERSIONS = (
    "import megatron.core, transformers; print(megatron.core.__version__, transformers.__version__)"
)


@functools.cache
def seen() -> tuple[bool, str]:
    """Return whether megatron-core can be imported, and its version or the error."""
    done = subprocess.run(
        [sys.executable, "-c", VERSIONS], capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stderr if done.returncode else done.stdout
    return done.returncode == 0, (said.strip() or "?").splitlines()[-1]


@pytest.mark.parametrize(
    ("distributed", "precision"), [("no", "no"), ("no", "bf16"), ("yes", "fp16")]
)
def test_losses_match_plain_transformers(
    device: torch.device, distributed: str, precision: str, record_property: Any
) -> None:
    imports, said = seen()
    if not imports:
        pytest.skip(f"megatron-core cannot be imported: {said}")
    record_property("megatron-core and transformers", said)
    done = subprocess.run(
        [sys.executable, str(WORKER), distributed, precision, str(device)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
    told = json.loads(line.removeprefix("TOLD"))
    tolerance = 1e-4 if precision == "no" else 3e-2
    torch.testing.assert_close(
        torch.tensor(told["losses"]),
        torch.tensor(told["expected"]),
        rtol=tolerance,
        atol=tolerance,
    )
