"""Collectives for several processes with one XLA device each.

This module follows the documentation of `torch_xla.core.xla_model`. It was never run on more than
one device, because processes of XLA on the CPU are not connected. Python objects are sent over a
gloo group in host memory. gloo accepts XLA tensors without an error but does not change them, so
nothing here passes it one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import ReduceOp, Scope, TorchCollectives
from accelerate_xla.library import imported


class XLACollectives(TorchCollectives):
    """The collectives of the contract, for tensors on XLA devices."""

    def gather(self, accelerator: Any, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the flat tensors of all ranks, concatenated."""
        gathered: torch.Tensor = _model().all_gather(tensor, dim=0, pin_layout=False)
        return gathered

    def reduce(
        self, accelerator: Any, tensor: torch.Tensor, op: ReduceOp, scope: Scope
    ) -> torch.Tensor:
        """Return the elementwise sum, mean, maximum or minimum over all ranks."""
        scale = 1.0 / dist.get_world_size() if op == "mean" else 1.0
        reduced = _model().all_reduce("sum" if op == "mean" else op, [tensor], scale=scale)
        result: torch.Tensor = reduced[0]
        return result

    def broadcast(
        self, accelerator: Any, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Send the tensor of rank `src` to every rank."""
        _model().collective_broadcast([tensor], root_ordinal=src)
        return tensor

    def scatter(
        self,
        accelerator: Any,
        parts: Sequence[torch.Tensor] | None,
        like: torch.Tensor,
        src: int,
        scope: Scope,
    ) -> torch.Tensor:
        """Send each rank its part. XLA has no scatter, so every rank receives all parts."""
        count = dist.get_world_size()
        rank = dist.get_rank()
        whole = like.new_zeros(count * like.numel()) if parts is None else torch.cat([*parts])
        return self.broadcast(accelerator, whole, src, scope).view(count, -1)[rank].clone()

    def all_to_all(self, accelerator: Any, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Exchange pieces of equal size between all ranks."""
        count = dist.get_world_size()
        exchanged: torch.Tensor = _model().all_to_all(
            tensor, split_dimension=0, concat_dimension=0, split_count=count, pin_layout=False
        )
        return exchanged

    def barrier(self, accelerator: Any, scope: Scope) -> None:
        """Run all pending operations, then wait for the other processes."""
        imported().sync(wait=True)
        super().barrier(accelerator, scope)


def _model() -> Any:
    return imported("core.xla_model")
