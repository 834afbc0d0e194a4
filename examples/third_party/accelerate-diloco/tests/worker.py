"""Trains a small model with DiLoCo on two ranks, and reports the result of each."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core import Accelerator
from accelerate_testing import count_communication, write_result


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batches(rank: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = [torch.randn(4, 6, generator=generator) for _ in range(steps)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def averaging(steps: int) -> tuple[list[float], list[float]]:
    """Plain PyTorch: AdamW on each rank, parameters averaged after every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for x, y in batches(rank, steps):
        loss = torch.nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= size
    return losses, flat(model)


def flat(model: Any) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def main(steps: int, settings: dict[str, Any]) -> None:
    from accelerate_core import DiLoCoSettings

    accelerator = Accelerator(
        cpu=True, diloco_plugin=DiLoCoSettings(**settings), process_group_timeout=60
    )
    model = net(accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    calls = []
    sent = 0
    for x, y in batches(accelerator.process_index, steps):
        with count_communication() as counted:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        calls.append(counted.total)
        sent += counted.bytes
    write_result(
        {
            "backend": accelerator.backend.name,
            "losses": losses,
            "weights": flat(accelerator.unwrap_model(model)),
            "plain": averaging(steps),
            "calls": calls,
            "bytes": sent,
            "model_bytes": sum(p.nbytes for p in model.parameters()),
            "outer_steps": accelerator.diloco_outer_steps,
        }
    )
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
