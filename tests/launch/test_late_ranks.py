"""When a rank times out, the launcher says where the ranks were that it waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import clean_environment

from accelerate_launch.late_ranks import describe_stacks

SLOW = """
import time, torch
from accelerate_core import Accelerator, Backend

class Slow(Backend):
    name = "slow"
    api_version = (1, 0)
    reduces_gradients = "backward"
    def prepare_model(self, accelerator, model, evaluation_mode):
        if accelerator.process_index == 1:
            time.sleep(60)
        return model

accelerator = Accelerator(cpu=True, backend=Slow, process_group_timeout=3)
accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.wait_for_everyone()
"""
IMPORTING = """Current thread 0x1 (most recent call first):
  File "/site/heavy/kernels.py", line 3 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/site/accelerate_x/backend.py", line 9 in prepare_model
  File "/site/accelerate_core/plugins/manager.py", line 1 in call
  File "/home/me/train.py", line 12 in <module>
"""
WAITING = """Thread 0x2 (most recent call first):
  File "/lib/threading.py", line 1 in run
  File "/lib/threading.py", line 2 in _bootstrap

Current thread 0x1 (most recent call first):
  File "/home/me/data.py", line 7 in load
  File "/home/me/train.py", line 5 in <module>
"""


def test_stacks_name_the_hook_and_the_import() -> None:
    said = describe_stacks(IMPORTING)
    assert (
        said
        == "was in the hook 'prepare_model' (accelerate_x/backend.py line 9), importing heavy/kernels.py"
    )


def test_stacks_name_the_line_of_the_script() -> None:
    said = describe_stacks(WAITING)
    assert said == "was in load (me/data.py line 7), called from me/train.py line 5"
    assert describe_stacks("") == ""


@pytest.mark.dist
def test_hook_of_the_late_rank_is_named(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    command = [sys.executable, "-m", "accelerate_core", "launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, str(script)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Meanwhile rank 1 was in the hook 'prepare_model'" in done.stderr
    assert "slow.py line 11), called from" in done.stderr
