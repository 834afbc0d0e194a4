"""What the workers of DeepSpeed share: models, data, and plain PyTorch to compare with."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from worker import PG_TIMEOUT, RANK, SIZE

from accelerate_core import Accelerator
from accelerate_deepspeed import DeepSpeedPlugin

sys.path.append(str(Path(__file__).parents[1] / "fsdp2"))
torch.set_num_threads(1)
#: Keeps the process group, so that each case has an Accelerator of its own on it.
KEPT = Accelerator(cpu=True, backend="deepspeed", process_group_timeout=PG_TIMEOUT)

FIELDS = DeepSpeedPlugin.__dataclass_fields__


def speed(config: Any = None, **options: Any) -> Accelerator:
    """Return an Accelerator; what is a field of the plugin goes there."""
    fields = {name: options.pop(name) for name in list(options) if name in FIELDS}
    steps = options.pop("steps", None)
    if steps is not None:
        options["gradient_accumulation_steps"] = steps
    return Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, **fields),
        process_group_timeout=PG_TIMEOUT,
        **options,
    )


class Tower(nn.Module):
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


def reference(model: nn.Module, make: Callable[..., Any], count: int = 3, **options: Any) -> Any:
    model = copy.deepcopy(model)
    steps(model, make(model.parameters(), **options), count=count)
    return model.state_dict()


def whole(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """The whole weights on every rank."""
    return accelerator.communicator.broadcast_object(
        {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    )


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=atol, msg=name)
