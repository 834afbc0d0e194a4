"""Two ranks, each with a fake device: losses, waits of a step, random states, resuming.

ranks_worker.py BACKEND PRECISION FOLDER
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_testing import fake_device

fake_device.install()

from accelerate_core import Accelerator  # noqa: E402
from accelerate_core.data.rng import synchronize_rng_states  # noqa: E402
from accelerate_testing import write_result  # noqa: E402

BATCH = 4


def parts() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    return model, optimizer, data


def losses_of_raw_torch(ranks: int) -> list[float]:
    """Train one epoch on the CPU in float32, on the batches of all ranks, without dropout."""
    model, optimizer, data = parts()
    model.eval()
    losses = []
    for x, y in DataLoader(data, batch_size=BATCH * ranks):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(backend: str, precision: str, folder: str) -> None:
    accelerator = Accelerator(backend=backend, mixed_precision=precision, process_group_timeout=60)
    device = accelerator.device
    model, optimizer, data = parts()
    loader = DataLoader(data, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> list[torch.Tensor]:
        losses = []
        for x, y in loader:
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model.eval()
    trained = [accelerator.reduce(loss, "mean").item() for loss in epoch()]
    model.train()
    with fake_device.record() as log:
        epoch()

    torch.fake.manual_seed(accelerator.process_index)
    synchronize_rng_states(["fake"], None, accelerator.communicator)
    drawn = torch.rand(3, device=device).cpu().tolist()

    torch.fake.manual_seed(10 + accelerator.process_index)
    path = accelerator.save_state(f"{folder}/state")
    first = [loss.item() for loss in epoch()]
    torch.manual_seed(99)
    accelerator.load_state(path)
    again = [loss.item() for loss in epoch()]
    write_result(
        {
            "device": str(device),
            "trained": trained,
            "expected": losses_of_raw_torch(accelerator.num_processes),
            "waits": [str(entry) for entry in log.host_waits],
            "races": [str(entry) for entry in log.races],
            "collectives": len(log.of("collective")),
            "drawn": drawn,
            "first": first,
            "again": again,
        }
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
