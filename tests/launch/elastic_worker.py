"""A run that saves after each step and continues from the newest checkpoint, on any number of processes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from accelerate_core import (
    Accelerator,
    DataLoaderConfiguration,
    ProjectConfiguration,
    set_seed,
)

FOLDER = Path(sys.argv[1])
STEPS = 20
BATCH, ACCUMULATE = 2, 3


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(4) + float(index))


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        scheduler_steps="per_step",
        # The same order, no matter how many processes begin.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
        project_config=ProjectConfiguration(
            str(FOLDER), automatic_checkpoint_naming=True, total_limit=3
        ),
    )
    set_seed(0)
    loader: Any = torch.utils.data.DataLoader(Numbers(), BATCH, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if any((FOLDER / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    rank, size = accelerator.process_index, accelerator.num_processes
    record = (FOLDER / f"rank-{rank}-{size}-{os.getpid()}").open("w")
    (FOLDER / f"size-{size}").touch()
    while progress.step < STEPS:
        seen: list[int] = []
        for numbers, x in loader:
            seen += numbers.tolist()
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            print(json.dumps([progress.step, seen]), file=record, flush=True)
            seen = []
            accelerator.save_state()
            wait(progress.step)
    weights = [
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()
    ]
    flat = torch.cat([one.detach().reshape(-1) for one in weights]).tolist()
    end = {"weights": flat, "explain": accelerator.explain()}
    print(json.dumps(end), file=record, flush=True)
    accelerator.end_training()


def wait(step: int) -> None:
    """Wait at steps after which the number of processes changes. The test creates the files."""
    (FOLDER / f"step-{step}").touch()
    until = time.monotonic() + 120
    while (FOLDER / f"hold-{step}").exists() and time.monotonic() < until:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
