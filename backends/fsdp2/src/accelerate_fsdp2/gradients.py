"""Gradients where torch keeps them: whole and not reduced yet, in parts, or of whole parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accelerate_fsdp2.clipping import local

__all__ = ["Parts", "average", "groups_of", "has_unreduced", "part_of"]


def groups_of(model: nn.Module) -> Iterator[Any]:
    """Iterate over what torch reduces together: whole gradients are kept there, out of reach."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch 2.11 has one, at most
                yield state._fsdp_param_group


def has_unreduced(model: nn.Module) -> bool:
    return any(
        parameter.unsharded_accumulated_grad is not None
        or getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None
        for group in groups_of(model)
        for parameter in group.fsdp_params
    )


class Parts:
    """What a gradient scaler needs of an optimizer: tensors with gradients."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parts}]


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    part = local(parameter.detach()).detach()
    assert parameter.grad is not None
    part.grad = local(parameter.grad)
    return part


@torch.no_grad()
def average(parameters: list[nn.Parameter], mesh: Any) -> None:
    """Average the gradients of whole parameters over the ranks that shards are reduced over.

    A rank that has none adds nothing; where no rank has one, none there will be.
    """
    dims = [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.mesh_dim_names]
    device = parameters[0].device
    there = torch.tensor([p.grad is not None for p in parameters], device=device).int()
    for dim in dims:
        dist.all_reduce(there, group=dim.get_group())
    used = [p for p, count in zip(parameters, there.tolist(), strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in dict.fromkeys(parameter.dtype for parameter in used):
        grads: list[Any] = [p.grad for p in used if p.dtype == dtype]
        flat: Any = torch.cat([grad.reshape(-1) for grad in grads])
        for dim in dims:
            dist.all_reduce(flat, group=dim.get_group())
        flat /= mesh.size()
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
