"""Ctrl-C prints one block with the last checkpoint, and a traceback only where somebody wants it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import clean_environment

WORKER = """
import os, signal, sys
from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration
if sys.argv[2] == "hook":
    sys.excepthook = lambda kind, error, trace: print("the script's hook", file=sys.stderr)
if sys.argv[2] == "prompt":
    sys.ps1 = ">>> "
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True),
)
if sys.argv[2] == "saved":
    accelerator.save_state()
os.environ["RANK"] = sys.argv[3]
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("case", "rank", "shown", "hidden"),
    [
        ("saved", "0", ["Interrupted by Ctrl-C at ", "checkpoint_0."], ["Traceback"]),
        ("plain", "0", ["Interrupted by Ctrl-C at "], ["Traceback", "checkpoint"]),
        ("saved", "1", [], ["Traceback", "Interrupted", "checkpoint_0"]),
        ("prompt", "0", ["Traceback", "KeyboardInterrupt"], ["Interrupted by"]),
        ("hook", "0", ["the script's hook"], ["Interrupted by"]),
    ],
)
def test_ctrl_c_prints_one_block(
    tmp_path: Path, case: str, rank: str, shown: list[str], hidden: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), case, rank],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert [text for text in shown if text not in done.stderr] == []
    assert [text for text in hidden if text in done.stderr] == []
