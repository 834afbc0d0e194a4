"""The device is found, chosen and refused without a line about it in a training script."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import sys, torch
from accelerate_core import Accelerator

accelerator = Accelerator(mixed_precision=sys.argv[1])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4))
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x).float(), y))
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"{accelerator.device} {accelerator.num_processes} {torch.accelerator.device_count()}\\n")
accelerator.end_training()
"""


def run(tmp_path, *command: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *command[:-1], str(script), command[-1]],
        env=os.environ | {"ACCELERATE_CONFIG_HOME": os.devnull},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_one_process_trains_on_the_device(tmp_path):
    done = run(tmp_path, "bf16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["fake:0", "1", "4"]


def test_gpu_ids_select_devices(tmp_path):
    done = run(tmp_path, "-m", "accelerate_core", "launch", "--gpu_ids", "1,3", "no")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["fake:0 2 2", "fake:1 2 2"]


def test_other_precisions_are_refused(tmp_path):
    done = run(tmp_path, "fp16")
    assert done.returncode != 0
    assert "mixed_precision='fp16' does not run on fake devices" in done.stderr
    assert "'no', 'bf16'" in done.stderr


def test_env_shows_the_device_and_who_registered_it():
    command = [sys.executable, "-m", "accelerate_core", "env", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    shown = json.loads(done.stdout)["devices"]
    assert shown["torch extension imagine"] == "accelerate-imagine 0.1.0"
    assert shown["device 3"].startswith("Fake device 3, ")
    assert shown["device plugin"] == "fake (accelerate-imagine 0.1.0)"
    assert "fake: fakeccl (accelerate_testing.fake_device.module)" in shown["collectives"]
