"""Local SGD: the ranks train independently for a few steps, and then average their parameters.

accelerate-core launch --num_processes 2 examples/by_feature/local_sgd.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, LocalSGD


def main(every: int = 4) -> dict[str, object]:
    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(digits()[0], batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=every) as local_sgd:
        for _ in range(3):
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()  # averages the weights in every fourth call and at the end
                losses.append(loss.detach())
    sums = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()[None]
    alike = accelerator.gather(sums)
    accelerator.end_training()
    return {"sums": alike.tolist(), "first": losses[0].item(), "last": losses[-1].item()}


if __name__ == "__main__":
    main()
