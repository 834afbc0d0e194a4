"""A training run that resumes from a bucket, and that may kill itself in the middle of an upload.

Arguments: the file for the final weights, how to save ("blocking" or "background"), and when to die:
"never", "part 3" (after the third part of a large file was sent), "publish" (before the manifest is
written), or "published" (right after it).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_core import Accelerator
from accelerate_core.utils import ProjectConfiguration, set_seed

#: A part of the smallest allowed size: each save sends several.
os.environ["ACCELERATE_OBJECT_STORE_PART_SIZE"] = str(5 << 20)


def die() -> None:
    """End without any cleanup, as when a machine is preempted."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(storage: Any, when: str) -> None:
    """Make the store kill this process."""
    moment, _, number = when.partition(" ")
    write, publish = storage.write, storage.publish
    parts: list[str] = []

    def counted(place: str, name: str, source: Any, progress: Any) -> None:
        def sent(count: int) -> None:
            progress(count)
            if count == 5 << 20:
                parts.append(name)
            if moment == "part" and len(parts) == int(number):
                die()

        write(place, name, source, sent)

    def published(*arguments: Any) -> None:
        if moment == "publish":
            die()
        publish(*arguments)
        if moment == "published":
            die()

    storage.write, storage.publish = counted, published


def main(out: str, how: str, when: str) -> None:
    """Train, starting from the newest checkpoint in the bucket."""
    url = os.environ["RUN"]
    project = ProjectConfiguration(url, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    set_seed(11)
    net = nn.Sequential(nn.Linear(64, 40000), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40000, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(24, 64, generator=generator), torch.arange(24) % 10)
    batches: Any = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, adam, batches)
    storage = accelerator.checkpointer.storage
    arm(storage, when)
    if storage.list(f"{url}/checkpoints"):
        print("resumed", accelerator.load_state(), flush=True)
    for _ in range(loader.iteration, 2):
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                accelerator.save_state(blocking=how == "blocking")
    accelerator.end_training()
    torch.save([p.detach() for p in accelerator.unwrap_model(model).parameters()], out)


if __name__ == "__main__":
    main(*sys.argv[1:])
