"""Save everything, go on from it: model, optimizer, schedule, random numbers, place in the data.

accelerate-core launch --num_processes 2 examples/by_feature/checkpointing.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import digits, network
from torch.utils.data import DataLoader

from accelerate_core import Accelerator, ProjectConfiguration


def train(folder: Path, stop_after: int | None = None) -> list[float]:
    """Train for two epochs; stop early if asked; go on if there is a checkpoint."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if (folder / "checkpoints").is_dir():
        accelerator.load_state()  # the newest that is whole
    done = 0
    while loader.iteration < 2:  # epochs that have been read to their end
        for images, labels in loader:  # after load_state: from where it was saved
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == stop_after:
                accelerator.save_state()
                accelerator.end_training()
                return []
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return [value.double().sum().item() for value in state.values()]


def main(folder: Path) -> dict[str, list[float]]:
    whole = train(folder / "whole")
    train(folder / "parts", stop_after=7)  # in the middle of an epoch
    return {"whole": whole, "parts": train(folder / "parts")}


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpointing_output")))
