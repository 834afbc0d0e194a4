"""A run to be killed and restarted, with dropout, shuffling, accumulation and many saves.

Arguments: the project folder, how to save ("blocking" or "background"), the file for the final weights, the
seconds between two batches, and the backend. The run starts from the newest checkpoint if there is one. It
prints nothing, and exits with status 0 when it is complete.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from worker import Counter

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration, set_seed

EPOCHS, SAVE_EVERY = 4, 3


def main(folder: Path, how: str, out: Path, pause: float, backend: str | None) -> None:
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        gradient_accumulation_steps=2,
        project_config=config,
        process_group_timeout=30,
    )
    set_seed(11, device_specific=True)
    # Large enough that a save takes some time, so that it can be killed during a save.
    net = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Dropout(0.2), nn.Linear(600, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(120, 64, generator=generator), torch.randint(10, (120,), generator=generator)
    )
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(net, adam, decay, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if any((folder / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    for _ in range(loader.iteration, EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.batches += 1
            if counter.batches % SAVE_EVERY == 0:  # every second save is inside a cycle
                accelerator.save_state(blocking=how == "blocking")
            time.sleep(pause)
    accelerator.wait_for_checkpoint()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = torch.cat([value.flatten() for value in state.values()])
        torch.save((counter.batches, weights), out)
    accelerator.end_training()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        Path(sys.argv[3]),
        float(sys.argv[4]),
        (sys.argv[5:] or [None])[0],
    )
