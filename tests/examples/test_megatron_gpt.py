"""The Megatron example trains in two dimensions, resumes in another layout, and exports the model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from support import run_workers
from test_char_gpt_and_gan import EXAMPLES
from transformers import AutoModelForCausalLM

SCRIPT = EXAMPLES / "megatron_gpt.py"
ON_CPU = Path(__file__).parents[1] / "backends" / "megatron" / "run_on_cpu.py"
SIZES = {"letters": 20_000, "layers": 2, "width": 32, "length": 32, "batch_size": 16}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]

pytestmark = pytest.mark.dist


def example(ranks: int, folder: Path, *flags: str) -> list[tuple[str, float, float]]:
    """Return step, loss and held-out loss of each report."""
    env = {"ACCELERATE_USE_CPU": "true"}
    arguments = [SCRIPT, *TINY, "--report_every=6", "--output_dir", folder, *flags]
    out = run_workers(ON_CPU, ranks, arguments, timeout=200, env=env).checked().stdout
    found = re.findall(r"^step +(\d+) +loss +([\d.]+) +held-out loss +([\d.]+)", out, re.M)
    return [(step, float(loss), float(other)) for step, loss, other in found]


@pytest.mark.timeout(400)
def test_trains_resumes_and_exports(tmp_path: Path) -> None:
    flags = ["--tp=2", "--pp=2", "--micro_batches=2", "--steps=12"]
    first, last = example(4, tmp_path, *flags)
    assert (first[0], last[0]) == ("6", "12")
    assert 3.5 < first[1] < 4.7, "log(96) is 4.56"
    assert last[1] < first[1] - 0.2
    rows = runpy.run_path(str(SCRIPT))["standard_library"](SIZES["letters"], SIZES["length"])
    rows = torch.stack([row["input_ids"] for row in rows[-2 * SIZES["batch_size"] :]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert model(rows, labels=rows).loss.item() == pytest.approx(last[2], abs=2e-5)
    flags = ["--distributed_optimizer", "--resume", "--steps=14"]
    (more,) = example(2, tmp_path, *flags)
    assert more[0] == "14"
    assert abs(more[2] - last[2]) < 0.3
