"""Find a batch size that fits into memory: start large, and retry with smaller ones.

accelerate-core launch --num_processes 2 examples/by_feature/batch_size_by_memory.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator
from accelerate_core.utils import find_executable_batch_size


def main(start: int = 512, largest: int = 200) -> dict[str, object]:
    accelerator = Accelerator()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> float:
        accelerator.free_memory()  # drops what the failed attempt has prepared
        tried.append(batch_size)
        if batch_size > largest:  # simulates a machine with little memory
            raise torch.OutOfMemoryError(f"CUDA out of memory at {batch_size} samples")
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = DataLoader(digits()[0], batch_size, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    loss = train()
    accelerator.print(f"tried {tried}, trained with {tried[-1]}")
    accelerator.end_training()
    return {"tried": tried, "loss": loss}


if __name__ == "__main__":
    main()
