"""Train six steps with accumulation 2 on the ring backend, or on the selected one."""

from __future__ import annotations

import sys
from typing import Any

import torch
from worker import write_result

from accelerate_core import Accelerator


def train(accelerator: Any, batch: int) -> list[float]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    said = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            said.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                said.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return said


def main() -> None:
    arguments: dict[str, Any] = {}
    if "argument" in sys.argv:
        from accelerate_core import RingPlugin

        arguments["ring_plugin"] = RingPlugin(chunk_mb=1)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, process_group_timeout=60, **arguments
    )
    said = train(accelerator, 16 // accelerator.num_processes)
    write_result(
        {
            "name": accelerator.backend.name,
            "type": accelerator.distributed_type.value,
            "explain": accelerator.explain(),
            "said": said,
        }
    )
    accelerator.end_training()


main()
