"""A small model and its data on a device, and Accelerators that end with their `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate_core import Accelerator

WIDTH = 64


def net(device: torch.device | str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    """Return a model, with the same weights every time."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(device)


def batches(device: torch.device | str, count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets, each of shape (32, WIDTH)."""
    random = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 32, WIDTH, generator=random).to(device) for _ in range(count)]
    return [(both[0], both[1]) for both in made]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has state."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@contextmanager
def accelerate(on_cpu: bool, **arguments: Any) -> Iterator[Accelerator]:
    """Yield an Accelerator on the tested device."""
    accelerator = Accelerator(cpu=on_cpu, process_group_timeout=60, **arguments)
    try:
        yield accelerator
    finally:
        accelerator.end_training()


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, data: Any, clip: float | None = None
) -> list[float]:
    """Take a step for each batch; return the losses."""
    losses = []
    for inputs, targets in data:
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        accelerator.backward(loss)
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def plain(model: nn.Module, data: Any, clip: float | None = None) -> list[float]:
    """Train like `train`, in plain torch."""
    optimizer = sgd(model)
    losses = []
    for inputs, targets in data:
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def equal(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    """Compare the weights of two models, on whatever device they are."""
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(
            whole.cpu(), theirs[name].cpu(), rtol=tolerance, atol=tolerance, msg=name
        )
