"""Ranks with `preemption_signals`, of which the last one ends in the way that the argument names."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration

folder, fault = Path(sys.argv[1]), sys.argv[2]
config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=config, preemption_signals="SIGTERM")
net = torch.nn.Linear(4, 1)
# The backend doesn't know the model, so no collective of a step fails when the other rank is gone.
optimizer, loader = accelerator.prepare(
    torch.optim.SGD(net.parameters(), lr=0.01),
    torch.utils.data.DataLoader(torch.randn(4000, 4), 2),
)
last = accelerator.process_index == accelerator.num_processes - 1
(folder / f"{accelerator.process_index}.pid").write_text(str(os.getpid()))
for step, x in enumerate(loader):
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and last:
        time.sleep(0.5)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("in the middle")
        if fault == "leave":
            os._exit(0)
    if step == 3 and fault == "long":
        time.sleep(100)
    time.sleep(0.05)
