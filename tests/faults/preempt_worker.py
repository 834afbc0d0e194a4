"""A long run that writes its process ID, so that it can get a signal, and its weights at the end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
accelerator = Accelerator(
    cpu=True,
    project_config=config,
    gradient_accumulation_steps=2,
    process_group_timeout=30,
    preemption_signals="SIGTERM,USR1",
)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(data, 2, shuffle=True)
)
if (folder / "checkpoints").exists():
    accelerator.load_state()
done = loader.state_dict()["batches_seen"]
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    done += 1
    if done == 3:
        (folder / f"{accelerator.process_index}.pid").write_text(str(os.getpid()))
    time.sleep(0.01 if steps else 0.0)
if accelerator.is_main_process:
    torch.save(net.state_dict(), folder / "weights.pt")
accelerator.end_training()
