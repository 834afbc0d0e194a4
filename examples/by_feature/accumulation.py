"""Accumulate gradients: several small batches make one optimizer step.

accelerate-core launch --num_processes 2 examples/by_feature/accumulation.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator


def main(steps: int = 4, batch_size: int = 16) -> dict[str, float]:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(digits()[0], batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    taken, losses = 0, []
    for _ in range(3):
        for images, labels in loader:
            with accelerator.accumulate(model):  # steps after every fourth batch and the last one
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()  # does nothing for the batches in between
                optimizer.zero_grad()
            taken += accelerator.sync_gradients
            losses.append(loss.detach())
    batches = len(loader)
    accelerator.print(f"{3 * batches} batches, {taken} optimizer steps")
    accelerator.end_training()
    first, last = torch.stack(losses[:10]).mean(), torch.stack(losses[-10:]).mean()
    return {"taken": taken, "batches": 3 * batches, "first": first.item(), "last": last.item()}


if __name__ == "__main__":
    main()
