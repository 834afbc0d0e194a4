"""A small model, data and training steps for the workers of several backends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from worker import RANK, SIZE


class Tower(nn.Module):
    """A model with its layers in a list, as backends that shard need them."""

    def __init__(self, seed: int = 0, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def data(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of this rank."""
    return tensor.chunk(SIZE)[RANK]


def steps(model: nn.Module, optimizer: Any, accelerator: Any = None, count: int = 3) -> None:
    x, y = data()
    for _ in range(count):
        if accelerator is None:
            mse_loss(model(x), y).backward()
        else:
            accelerator.backward(mse_loss(model(mine(x)), mine(y)))
        optimizer.step()
        optimizer.zero_grad()


def reference(model: nn.Module, make: Callable[..., Any], count: int = 3, **options: Any) -> Any:
    model = copy.deepcopy(model)
    steps(model, make(model.parameters(), **options), count=count)
    return model.state_dict()


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=name)
