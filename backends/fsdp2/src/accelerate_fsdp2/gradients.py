"""Gradients: whole and not reduced yet, sharded, or of parameters that stay whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank holds, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_with_grad(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds, with that part's gradient."""
    part = local(parameter.detach()).detach()
    assert parameter.grad is not None
    part.grad = local(parameter.grad)
    return part


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


@torch.no_grad()
def average(parameters: list[nn.Parameter], mesh: Any) -> None:
    """Average the gradients of whole parameters over the ranks that shards are reduced over.

    A rank that has none adds nothing; where no rank has one, none there will be.
    """
    groups = [mesh.get_group(number) for number in range(mesh.ndim)]
    there = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device)
    there = there.int()
    for group in groups:
        dist.all_reduce(there, group=group)
    used = [p for p, count in zip(parameters, there.tolist(), strict=True) if count]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in dict.fromkeys(parameter.dtype for parameter in used):
        grads: list[Any] = [p.grad for p in used if p.dtype == dtype]
        flat: Any = torch.cat([grad.reshape(-1) for grad in grads])
        for group in groups:
            dist.all_reduce(flat, group=group)
        flat /= mesh.size()
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip the gradients by their joint norm; return it, on every rank, as a plain tensor.

    Those of one mesh are reduced together; the norms of the meshes are then joined.
    """
    norm_type = float(norm_type)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault(key, []).append(grad)
    norms = []
    for key, together in groups.items():
        if norm_type == math.inf:
            norms.append(_largest(together, key[0] if key else None))
            continue
        norm = torch.nn.utils.get_total_norm(together, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    joined = torch.stack(norms)
    # A norm of order 0 is a count.
    total: torch.Tensor = joined.sum() if norm_type == 0 else joined.norm(norm_type)
    scale(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _largest(grads: Sequence[torch.Tensor], mesh: Any) -> torch.Tensor:
    """Return the largest element of all shards; torch has none of a rank whose shard is empty."""
    parts = [part for part in map(local, grads) if part.numel()]
    largest = torch.zeros((), device=local(grads[0]).device)
    if parts:
        largest = torch.stack([part.abs().max().float() for part in parts]).max()
    for dimension in range(mesh.ndim if mesh is not None else 0):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest


@torch.no_grad()
def scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place, those of one device and dtype together."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in map(local, grads):
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), together in groups.items():
        torch._foreach_mul_(together, factor.to(device, torch.promote_types(dtype, torch.float32)))
