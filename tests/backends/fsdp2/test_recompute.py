"""Activation checkpointing uses the precision's own recomputation, if it has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate_core import Accelerator
from accelerate_fsdp2 import FullyShardedDataParallelPlugin


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_recompute_of_the_precision_is_used_if_there_is_one() -> None:
    calls: list[str] = []

    def recompute(function: Any, *args: Any) -> Any:
        calls.append(type(function.__self__).__name__)
        return checkpoint(function, *args, use_reentrant=False)

    gradients = []
    for own in (None, recompute):
        plugin = FullyShardedDataParallelPlugin(
            activation_checkpointing=True,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Sequential"],
        )
        with Accelerator(cpu=True, backend="fsdp2", fsdp_plugin=plugin) as accelerator:
            accelerator.precision.recompute = lambda _, own=own: own
            torch.manual_seed(0)
            model = accelerator.prepare(Units())
            accelerator.backward(model(torch.ones(2, 4)).sum())
            gradients.append([p.grad.full_tensor() for p in model.parameters()])
    assert len(calls) == 2
    assert all("Sequential" in name for name in calls)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
