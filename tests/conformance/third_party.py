"""One process or rank of a run with third-party plugins; it reports the active ones."""

from __future__ import annotations

import os

import torch

from accelerate_core import Accelerator
from accelerate_testing import write_result


def main() -> None:
    accelerator = Accelerator(cpu=True, process_group_timeout=60)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    write_result(
        {
            "backend": accelerator.backend.name,
            "precision": accelerator.mixed_precision,
            "layers": [type(m).__name__ for m in accelerator.unwrap_model(model).modules()],
            "wrapper": type(model).__name__,
            "names": sorted(state),
            "losses": losses,
            "explain": accelerator.explain(),
            "parent": os.environ.get("WORLD_SIZE", ""),
            "agent": "TORCHELASTIC_RUN_ID" in os.environ,
        }
    )
    accelerator.end_training()


main()
