"""Log values, here to the built-in tracker `jsonl`, which needs no library.

accelerate-core launch --num_processes 2 examples/by_feature/tracking.py
accelerate-core runs show tracking_output
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator


def main(folder: Path, log_with: str = "jsonl") -> dict[str, int]:
    accelerator = Accelerator(log_with=log_with, project_dir=str(folder))
    accelerator.init_trackers("digits", config={"lr": 3e-3, "batch_size": 64})
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (images, labels) in enumerate(loader):
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=step)  # only the main process writes it
    accelerator.end_training()  # waits until all values are written
    return {"steps": len(loader)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tracking_output"))
