"""Operations on gradients: averaging, clipping and scaling, with shards and whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor. It shares the tensor's memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def locals_with_grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each parameter that has a gradient, with that part's gradient."""
    parts = []
    for parameter in parameters:  # no function call per parameter, because this runs in every step
        grad = parameter.grad
        if grad is None:
            continue
        held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        part = held.detach()
        part.grad = grad._local_tensor if isinstance(grad, DTensor) else grad
        parts.append(part)
    return parts


def groups_of(model: nn.Module) -> Iterator[Any]:
    """Yield torch's groups of parameters that are reduced together, which hold whole gradients."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch 2.11 has at most one
                yield state._fsdp_param_group


def unreduced(parameter: Any) -> torch.Tensor | None:
    """Return the unreduced gradient of one of FSDP's parameters on this rank, or None."""
    accumulated: torch.Tensor | None = parameter.unsharded_accumulated_grad
    if accumulated is not None:
        return accumulated
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


@torch.no_grad()
def average(parameters: list[nn.Parameter], mesh: Any) -> None:
    """Average the gradients of unsharded parameters over the ranks of the mesh.

    A rank without a gradient counts as zero. If no rank has one, there is none afterwards.
    """
    groups = [mesh.get_group(number) for number in range(mesh.ndim)]
    counts = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device)
    counts = counts.int()
    for group in groups:
        dist.all_reduce(counts, group=group)
    used = [p for p, count in zip(parameters, counts.tolist(), strict=True) if count]
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


class Layouts:
    """Numbers the combinations of mesh and placements, looked up once per parameter.

    Comparing meshes and placements for each gradient in each step would cost more than clipping.
    """

    def __init__(self) -> None:
        #: Id of a parameter -> number of its layout, starting at 1. 0 is a plain tensor.
        self.of_parameter: dict[int, int] = {}
        self._layouts: list[tuple[Any, Any]] = []

    def learn(self, parameter: torch.Tensor, grad: DTensor) -> int:
        """Return the number of a gradient's layout, and remember it for the parameter."""
        layout = (grad.device_mesh, grad.placements)
        if layout not in self._layouts:
            self._layouts.append(layout)
        number = self._layouts.index(layout) + 1
        self.of_parameter[id(parameter)] = number
        return number

    def mesh(self, number: int) -> Any:
        """Return the mesh of a layout, or None for plain tensors."""
        return self._layouts[number - 1][0] if number else None

    def forget(self) -> None:
        """Forget all parameters, because their ids can be reused."""
        self.of_parameter.clear()


@torch.no_grad()
def clip_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, layouts: Layouts
) -> torch.Tensor:
    """Clip gradients by their total norm, and return it on every rank as a plain tensor.

    The norm is computed for each layout, and the results are combined.
    """
    norm_type = float(norm_type)
    grads: list[torch.Tensor] = []
    groups: dict[int, list[torch.Tensor]] = {}
    known = layouts.of_parameter
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        number = 0
        if isinstance(grad, DTensor):
            number = known.get(id(parameter), 0) or layouts.learn(parameter, grad)
        grads.append(grad)
        groups.setdefault(number, []).append(grad)
    if not grads:
        return torch.zeros(())
    norms = []
    for number, together in groups.items():
        if norm_type == math.inf:
            norms.append(_largest(together, layouts.mesh(number)))
            continue
        norm = torch.nn.utils.get_total_norm(together, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    joined = torch.stack(norms)
    # A norm of order 0 is a count.
    total: torch.Tensor = joined.sum() if norm_type == 0 else joined.norm(norm_type)
    scale(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _largest(grads: Sequence[torch.Tensor], mesh: Any) -> torch.Tensor:
    """Return the largest absolute value over all shards, some of which can be empty."""
    parts = [part for part in map(local, grads) if part.numel()]
    largest = torch.zeros((), device=local(grads[0]).device)
    if parts:
        largest = torch.stack([part.abs().max().float() for part in parts]).max()
    for dimension in range(mesh.ndim if mesh is not None else 0):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest


@torch.no_grad()
def scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place, with one operation per device and dtype."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        part = grad._local_tensor if isinstance(grad, DTensor) else grad
        groups.setdefault((part.device, part.dtype), []).append(part)
    for (device, dtype), together in groups.items():
        torch._foreach_mul_(together, factor.to(device, torch.promote_types(dtype, torch.float32)))


def unscale(optimizer: Any, scaler: Any) -> None:
    """Divide each shard of an optimizer's gradients by the loss scale, and share overflows."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = locals_with_grads(parameters)
    substitute = SimpleNamespace(param_groups=[{"params": parts}])  # all that a scaler needs
    scaler.unscale_(substitute)
    entry = scaler._per_optimizer_states.pop(id(substitute))
    for found in entry["found_inf_per_device"].values():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    scaler._per_optimizer_states[id(optimizer)] = entry
