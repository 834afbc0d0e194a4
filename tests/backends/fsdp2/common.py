"""What the workers of FSDP2 share: models, data, and how weights are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from gpt import PLAN
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from worker import PG_TIMEOUT, RANK, SIZE

from accelerate_core import Accelerator, ParallelismConfig
from accelerate_core.utils import (
    TorchTensorParallelConfig,
)
from accelerate_fsdp2 import FullyShardedDataParallelPlugin
from accelerate_fsdp2.testing import enable_cpu_ring_attention

torch.set_num_threads(1)
enable_cpu_ring_attention()
KEPT = Accelerator(cpu=True, backend="fsdp2", process_group_timeout=PG_TIMEOUT)


def fsdp(sizes: dict[str, int] | None = None, plan: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator; what is no argument of it is the plugin's."""
    plugin = {
        name: options.pop(name)
        for name in list(options)
        if name in FullyShardedDataParallelPlugin.__dataclass_fields__
    }
    config = None
    if sizes:
        handler = TorchTensorParallelConfig(plan=PLAN if plan is None else plan)
        config = ParallelismConfig(
            **{f"{name}_size": size for name, size in sizes.items()}, tp_handler=handler
        )
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        parallelism_config=config,
        process_group_timeout=PG_TIMEOUT,
        **options,
    )


class Tower(nn.Module):
    """Layers in a list, as FSDP2 likes them."""

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
    return (
        torch.randn(rows, 8, generator=generator),
        torch.randn(rows, 8, generator=generator),
    )


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
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


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=name)


def reference(model: nn.Module, make: Callable[..., Any], count: int = 3, **options: Any) -> Any:
    model = copy.deepcopy(model)
    optimizer = make(model.parameters(), **options)
    steps(model, optimizer, count=count)
    return model.state_dict()
