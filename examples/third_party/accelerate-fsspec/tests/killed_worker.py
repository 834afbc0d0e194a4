"""A training run that resumes, and that may kill itself in the middle of a save.

Arguments: the file for the final weights, how to save ("blocking" or "background"), and when to die:
"never", "publish" (before it), "published" (after it), or "write 7" (during the seventh upload).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration, set_seed


def die() -> None:
    """End without any cleanup, as when a machine is preempted."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(storage: Any, when: str) -> None:
    """Make the store kill this process."""
    moment, _, number = when.partition(" ")
    write = storage.write
    publish = storage.publish
    written = []

    def counted(place: str, name: str, *more: Any) -> None:
        if not name.endswith(".lease"):
            written.append(name)
        if moment == "write" and len(written) == int(number):
            threading.Timer(0.003, die).start()
        write(place, name, *more)

    def published(*arguments: Any) -> None:
        if moment == "publish":
            die()
        publish(*arguments)
        if moment == "published":
            die()

    storage.write = counted
    storage.publish = published


def main(out: str, how: str, when: str) -> None:
    """Train, starting from the newest checkpoint."""
    project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, checkpointer="fsspec", project_config=project)
    set_seed(11)
    net = nn.Sequential(nn.Linear(64, 8000), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8000, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(48, 64, generator=generator), torch.arange(48) % 10)
    model, optimizer, loader = accelerator.prepare(
        net, adam, DataLoader(data, batch_size=4, shuffle=True)
    )
    storage = accelerator.checkpointer.storage
    arm(storage, when)
    if storage.list(f"{os.environ['ACCELERATE_FSSPEC_URL']}/checkpoints"):
        accelerator.load_state()
    for _ in range(loader.iteration, 2):
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 3:
                accelerator.save_state(blocking=how == "blocking")
    accelerator.end_training()
    torch.save([p.detach() for p in accelerator.unwrap_model(model).parameters()], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
