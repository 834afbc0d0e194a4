"""The mock of Transformer Engine, and helpers to train with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_core import Accelerator
from accelerate_fp8 import TERecipeKwargs
from accelerate_fp8.transformer_engine import TransformerEngine

MOCK_LIBRARIES = Path(__file__).with_name("mock_libraries")


def use() -> Any:
    """Make `import transformer_engine` import the mock, and return it."""
    sys.path.insert(0, str(MOCK_LIBRARIES))
    TransformerEngine.devices = ("cpu", "cuda")
    import transformer_engine.pytorch as te

    return te


class Net(nn.Module):
    """A model whose first linear layer cannot be converted, while others can."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(10, 32)
        self.norm = nn.LayerNorm(32, eps=1e-3)
        self.body = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.first(x))))


def batches(count: int, rank: int = 0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [(rank + 1) * torch.randn(8, 10, generator=source) for _ in range(count)]


def accelerator(recipe: TERecipeKwargs | None = None, **arguments: Any) -> Accelerator:
    handlers = [TERecipeKwargs(amax_history_len=4) if recipe is None else recipe]
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers, **arguments)


def prepared(accelerator: Accelerator, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = Net() if model is None else model
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def train(accelerator: Accelerator, model: Any, optimizer: Any, data: list[torch.Tensor]) -> Any:
    losses = []
    for batch in data:
        loss = (model(batch) - batch[:, :1]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scales(accelerator: Accelerator, model: Any) -> torch.Tensor:
    """Return all scales and histories of the forward in one vector."""
    found = [
        tensor.flatten()
        for module in accelerator.unwrap_model(model).modules()
        if (state := getattr(module, "fp8_meta", {}).get("scaling_fwd")) is not None
        for tensor in (state.scale, state.amax_history)
    ]
    return torch.cat(found).clone()
