"""The examples char_gpt and gan run on two processes for a few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_workers

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"megabytes": 0.2, "layers": 1, "width": 32, "length": 32, "sample": 20, "report_every": 4}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]

pytestmark = pytest.mark.dist


def example(name: str, *arguments: str | Path) -> str:
    """Run an example on two processes, and return its output."""
    env = {"ACCELERATE_USE_CPU": "true"}
    return run_workers(EXAMPLES / name, 2, arguments, timeout=120, env=env).checked().stdout


def test_char_gpt_learns_and_resumes(tmp_path: Path) -> None:
    first = example("char_gpt.py", *TINY, "--steps", "8", "--output_dir", tmp_path)
    losses = [float(loss) for loss in re.findall(r"held-out loss +(\d+\.\d+)", first)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    second = example("char_gpt.py", *TINY, "--steps", "12", "--output_dir", tmp_path, "--resume")
    assert "resuming after step 8" in second
    assert re.findall(r"^step +(\d+)", second, re.M) == ["12"]
    assert second.count("written by the model") == 1


def test_gan_trains_two_models_in_one_loop(tmp_path: Path) -> None:
    output = example("gan.py", "--epochs", "2", "--output_dir", tmp_path)
    assert len(re.findall(r"^epoch +2/2  critic loss \d+\.\d+  painter loss", output, re.M)) == 1
    assert (tmp_path / "painted.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
