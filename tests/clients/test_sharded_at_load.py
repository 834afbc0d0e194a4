"""Transformers' Trainer on the drop-in, with a model that was sharded when it was loaded.

Accelerate has no FSDP on the CPU, so the results are compared with those of one process.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients import ENVIRONMENTS, HERE
from support import clean_environment

PYTHON = ENVIRONMENTS / "ours" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="run `make clients` to create the environment"
)


def train(folder: Path, ranks: int, batch: int, tp: int = 1) -> dict[str, Any]:
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [
            str(PYTHON),
            *(launch if ranks > 1 else []),
            *(str(HERE / "sharded_at_load_worker.py"), str(folder), str(batch), str(tp)),
        ],
        env=clean_environment(PYTHONPATH=str(HERE / "cases"), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.timeout(700)
def test_trainer_on_a_model_sharded_at_load_equals_one_process(tmp_path: Path) -> None:
    """Transformers itself refuses to save optimizers of such a model, so only weights are saved."""
    one = train(tmp_path / "one", 1, batch=8)
    two = train(tmp_path / "two", 2, batch=4)
    assert "Resuming is not supported for models sharded at load time" in two["resume"]
    assert len(two["losses"]) == 6
    for name in ("losses", "norms", "final", "out/checkpoint-2"):
        assert two[name] == pytest.approx(one[name], abs=1e-4 if "/" in name else 1e-5), name


@pytest.mark.timeout(400)
def test_split_layers_in_the_trainer_are_an_error_that_says_what_works(tmp_path: Path) -> None:
    two = train(tmp_path / "two", 2, batch=8, tp=2)
    assert "tp_size=2" in two["error"]
    assert "accelerator.prepare(model, optimizer, loader)" in two["error"]
