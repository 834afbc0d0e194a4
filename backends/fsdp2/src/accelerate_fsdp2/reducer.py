"""The reduce-scatter of FSDP2, computed by a plugin that implements `reduce_gradients`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate_core.plugin import ConfigurationError, GradientReducer


def use_reducer(replicas: int, model: nn.Module, reducer: GradientReducer) -> None:
    """Replace the reduce-scatter of each unit of a model by the reducer's.

    Args:
        replicas: `dp_replicate_size`.

    Raises:
        ConfigurationError: gradients are also reduced over copies of the shards.
    """
    if replicas > 1:
        raise ConfigurationError(
            f"dp_replicate_size={replicas} also averages gradients over copies of the shards, for "
            "which fully_shard accepts no other collective. Use dp_replicate_size=1, the backend "
            "ddp, or disable the plugin that implements reduce_gradients."
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for number, unit in enumerate(units):
        collective: Any = PluginReduceScatter(reducer, number)
        unit.set_custom_reduce_scatter(collective)


class PluginReduceScatter:
    """Computes `fully_shard`'s reduce-scatter with a plugin's reducer.

    The reducer returns means. torch asks for a sum where it divides by the number of ranks itself, in
    fp16 before and after the collective.

    Args:
        reducer: the plugin's reducer.
        number: the number of the sharded unit.
    """

    def __init__(self, reducer: GradientReducer, number: int) -> None:
        self._reducer = reducer
        self._number = number

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new buffer for the collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce, and write this rank's part to `output_tensor`."""
        self._reducer.reduce_scatter(output_tensor, input_tensor, self._number, group)
        if op == dist.ReduceOp.SUM:
            output_tensor *= group.size()
