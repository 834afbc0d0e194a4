"""The FSDP2 example can be resumed in another layout, only by changing flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_char_gpt_and_gan import example

SIZES = {"letters": 20_000, "layers": 1, "width": 32, "length": 32, "sample": 10}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]

pytestmark = pytest.mark.dist


def test_sharded_run_resumes_as_a_tensor_parallel_one(tmp_path: Path) -> None:
    first = example(
        "fsdp2_gpt.py", *TINY, "--steps=4", "--report_every=2", "--output_dir", tmp_path
    )
    assert "dp_shard 2 = 2 process(es)" in first
    weights, here = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:weights|of them)", first)
    )
    assert abs(here - weights / 2) <= 64, "each rank has half of the weights"
    assert (tmp_path / "model.safetensors").exists()
    flags = ["--tp=2", "--resume", "--steps=6", "--report_every=2", "--output_dir", tmp_path]
    second = example("fsdp2_gpt.py", *TINY, *flags)
    assert "tp 2 = 2 process(es)" in second
    assert re.findall(r"step +(\d+)", second) == ["6"], "does not repeat the first four steps"
