"""A learning rate with warm-up and decay, on any number of processes.

On n processes, a prepared scheduler advances n times per optimizer step. A schedule written for one
process therefore ends at the same sample. With gradient accumulation, it counts optimizer steps.

accelerate-core launch --num_processes 2 examples/by_feature/schedule.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator


def main(epochs: int = 2) -> dict[str, object]:
    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(digits()[0], batch_size=32, shuffle=True)
    total = epochs * len(loader)  # before prepare, this is the number of steps of one process
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=total // 10)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - total // 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [total // 10])
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(epochs):
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
    accelerator.print(f"learning rate {rates[0]:.5f}, at most {max(rates):.5f}, {rates[-1]:.6f}")
    accelerator.end_training()
    return {"first": rates[0], "most": max(rates), "last": rates[-1]}


if __name__ == "__main__":
    main()
