"""Continue a run for a few steps from its last checkpoint, with any mesh and number of ranks.

Arguments: mesh sizes (JSON), project folder, total number of micro-batches, and the backend. Rank 0
appends the losses to a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, LENGTH, PLAN, loss_of, text
from torch.utils.data import DataLoader, TensorDataset
from worker import Counter

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    TorchTensorParallelConfig,
    set_seed,
)

BATCH = 8


def main(sizes: dict[str, int], folder: Path, until: int, backend: str = "fsdp2") -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        parallelism_config=ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()},
            tp_handler=TorchTensorParallelConfig(plan=PLAN),
        ),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True),
        gradient_accumulation_steps=2,
        # The batch size is for all ranks together, so that schedulers step equally often. The order
        # of samples doesn't depend on the number of ranks.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        process_group_timeout=60,
    )
    set_seed(3)
    model: Any = GPT()
    adam: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    decay: Any = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)

    loader: Any = DataLoader(TensorDataset(text(96)), BATCH, shuffle=True)
    model, adam, decay, loader = accelerator.prepare(model, adam, decay, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    losses = folder / "losses.txt"
    while counter.batches < until:
        for (rows,) in loader:
            with accelerator.accumulate(model):
                places = torch.arange(LENGTH).expand(len(rows), -1)
                loss = loss_of(model, rows[:, :-1], places, rows[:, 1:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                adam.step()
                decay.step()
                adam.zero_grad()
            counter.batches += 1
            mean = float(accelerator.reduce(loss.detach(), "mean"))
            if accelerator.is_main_process:
                with losses.open("a") as file:
                    file.write(f"{counter.batches} {mean!r}\n")
            if counter.batches == until:
                break
    accelerator.save_state(blocking=until % 4 == 0)
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
