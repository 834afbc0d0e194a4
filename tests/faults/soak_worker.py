"""Train until rank 1 is killed, a given number of seconds after the start of training."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

from accelerate_core import Accelerator

accelerator = Accelerator(cpu=True, process_group_timeout=30)
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
if accelerator.process_index == 1:
    timer = threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
while True:
    accelerator.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.gather(torch.ones(3))
