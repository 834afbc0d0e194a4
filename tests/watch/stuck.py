"""Trains a few steps on several ranks; then rank 1, or the last rank, gets stuck in a given way."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from accelerate_core import Accelerator

how = sys.argv[1]
accelerator = Accelerator(cpu=True, process_group_timeout=45)
if how == "handler":  # as `preemption_signals` does
    signal.signal(signal.SIGUSR2, lambda *_: print("the script's handler", flush=True))
culprit = accelerator.process_index == accelerator.num_processes - 1
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)


def load_batch(step: int) -> torch.Tensor:
    if how == "slow" and culprit:
        time.sleep(0.3)
    if step == 3 and culprit:
        if how == "sleep":
            time.sleep(60)
        if how == "raise":
            raise ValueError("a bad sample")
        if how == "stop":
            time.sleep(2.5)  # a rank that is alone on its machine gives a sign of life every 2 s
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "gil":
            sum(range(10**11))  # keeps Python's global lock
    time.sleep(0.2 if how != "slow" else 0.02)
    return torch.ones(2, 4)


def train(step: int) -> None:
    loss = model(load_batch(step)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    for step in range(200 if how == "slow" else 5):
        try:
            train(step)
        except ValueError:
            pass
    if how == "mismatch":
        if culprit:
            accelerator.gather(torch.ones(3))
        else:
            accelerator.reduce(torch.ones(3))
    if how == "shapes":
        # accelerator.gather would compare the shapes.
        sent = torch.ones(5000 if culprit else 16, dtype=torch.uint8)
        accelerator.communicator.gather(sent)
    accelerator.wait_for_everyone()
    if how in ("wait", "handler"):
        if accelerator.is_main_process:
            print(accelerator.explain())
            print("ready", flush=True)
        time.sleep(60)


main()
