"""Norms and factors of gradients that are whole, sharded, or sharded over several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["clip_norm", "local", "scale"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank holds, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scale(grads, factor)
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
