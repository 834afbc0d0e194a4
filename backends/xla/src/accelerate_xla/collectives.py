"""The collectives of several processes, each with a device of its own.

Written to the documentation of `torch_xla.core.xla_model`, and never run on more than one device:
on the CPU processes do not see each other. What is no tensor goes over a group of gloo in host memory,
which takes a tensor of XLA without an error and without an effect; so none of these hands it one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_core.plugin import ReduceOp, Scope, TorchCollectives
from accelerate_xla.library import imported


class XLACollectives(TorchCollectives):
    """The contract's collectives for tensors on XLA devices."""

    def gather(self, accelerator: Any, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Return the ranks' flat tensors one after the other."""
        gathered: torch.Tensor = _model().all_gather(tensor, dim=0, pin_layout=False)
        return gathered

    def reduce(
        self, accelerator: Any, tensor: torch.Tensor, op: ReduceOp, scope: Scope
    ) -> torch.Tensor:
        """Combine elementwise on every rank."""
        scale = 1.0 / dist.get_world_size() if op == "mean" else 1.0
        reduced = _model().all_reduce("sum" if op == "mean" else op, [tensor], scale=scale)
        result: torch.Tensor = reduced[0]
        return result

    def broadcast(
        self, accelerator: Any, tensor: torch.Tensor, src: int, scope: Scope
    ) -> torch.Tensor:
        """Give every rank the tensor of rank `src`."""
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
        """Give each rank its own part; the whole goes to each, as XLA has no other way."""
        count = dist.get_world_size()
        rank = dist.get_rank()
        whole = like.new_zeros(count * like.numel()) if parts is None else torch.cat([*parts])
        return self.broadcast(accelerator, whole, src, scope).view(count, -1)[rank].clone()

    def all_to_all(self, accelerator: Any, tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
        """Exchange equal pieces."""
        count = dist.get_world_size()
        exchanged: torch.Tensor = _model().all_to_all(
            tensor, split_dimension=0, concat_dimension=0, split_count=count, pin_layout=False
        )
        return exchanged

    def barrier(self, accelerator: Any, scope: Scope) -> None:
        """Run what is pending, and meet on the host."""
        imported().sync(wait=True)
        super().barrier(accelerator, scope)


def _model() -> Any:
    return imported("core.xla_model")
