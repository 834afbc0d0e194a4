"""Stop all processes when one of them decides to: any rank can set a trigger that all ranks check.

accelerate-core launch --num_processes 2 examples/by_feature/early_stopping.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator


def main(good_enough: float = 0.3, epochs: int = 20) -> dict[str, int]:
    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(digits()[0], batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if loss.item() < good_enough:  # may be true on some ranks only
                accelerator.set_trigger()
            if accelerator.check_trigger():  # returns the same on every rank
                accelerator.print(f"stopped after {steps} steps")
                accelerator.end_training()
                return {"steps": steps, "most": epochs * len(loader)}
    accelerator.end_training()
    return {"steps": steps, "most": epochs * len(loader)}


if __name__ == "__main__":
    main()
