"""The DeepSpeed example trains at stage 3 with offload, and resumes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_char_gpt_and_gan import example

SIZES = {"letters": 20_000, "layers": 1, "width": 32, "length": 32, "sample": 5}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]
CONFIGS = Path(__file__).parents[2] / "examples" / "deepspeed"

pytestmark = pytest.mark.dist


def test_trains_with_offload_and_resumes(tmp_path: Path) -> None:
    flags = [*TINY, "--config", CONFIGS / "offload.json", "--output_dir", tmp_path]
    first = example("deepspeed_gpt.py", *flags, "--steps=4", "--report_every=2")
    assert "ZeRO stage 3 on 2 process(es)" in first
    assert (tmp_path / "model.safetensors").exists()
    more = ["--resume", "--steps=6", "--report_every=2"]
    second = example("deepspeed_gpt.py", *flags, *more)
    assert re.findall(r"step +(\d+)", second) == ["6"], "does not repeat the first four steps"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.json")))
def test_configs_are_accepted(name: str) -> None:
    from accelerate_deepspeed import DeepSpeedPlugin
    from accelerate_deepspeed.automatic import resolve_fields

    resolve_fields(DeepSpeedPlugin(hf_ds_config=CONFIGS / name))
