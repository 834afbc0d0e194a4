"""Save and resume: model, optimizer, random states and the position in the data.

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
    """Train for two epochs, and resume if there is a checkpoint. May save and stop early."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(digits()[0], batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if (folder / "checkpoints").is_dir():
        accelerator.load_state()  # loads the newest intact checkpoint
    done = 0
    while loader.iteration < 2:  # number of completed epochs
        for images, labels in loader:  # continues where the checkpoint was saved
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
