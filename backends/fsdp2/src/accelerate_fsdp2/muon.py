"""`torch.optim.Muon` on sharded matrices.

Muon orthogonalises the update of each matrix, which needs the whole matrix. torch would compute it on
shards, in bf16, and add up partial products, so the result would depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate

from accelerate_core.plugin import ParallelismConfig
from accelerate_fsdp2.weights import local_part

Orthogonalise = Callable[..., torch.Tensor]


@contextmanager
def whole_matrices(config: ParallelismConfig, rank: int) -> Iterator[None]:
    """Orthogonalise whole matrices while Muon steps inside the block.

    The ranks take turns: one matrix at a time is gathered, the rank whose turn it is computes it, and each
    rank keeps its part of the result. Momentum stays sharded.
    """
    from torch.optim import _muon as module

    _muon: Any = module
    step: Callable[..., None] = _muon._single_tensor_muon
    orthogonalise: Orthogonalise = _muon._zeropower_via_newtonschulz

    def step_in_turns(
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        **options: Any,
    ) -> None:
        for mesh, numbers in _turns(params):
            chosen = [[tensors[n] for n in numbers] for tensors in (params, grads, buffers)]
            if mesh is None:
                step(*chosen, **options)
                continue
            updates = [_update(grads[n], buffers[n], options) for n in numbers]
            made = iter(_shared_out(updates, mesh, orthogonalise, options, config, rank))
            _muon._zeropower_via_newtonschulz = lambda *_, made=made: next(made)
            try:
                step(*chosen, **options)
            finally:
                _muon._zeropower_via_newtonschulz = orthogonalise

    _muon._single_tensor_muon = step_in_turns
    try:
        yield
    finally:
        _muon._single_tensor_muon = step


def _turns(params: Sequence[torch.Tensor]) -> Iterator[tuple[DeviceMesh | None, Sequence[int]]]:
    """Divide parameters into rounds, in each of which a rank computes at most one of them."""
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for number, param in enumerate(params):
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        by_mesh.setdefault(mesh, []).append(number)
    for mesh, numbers in by_mesh.items():
        size = len(numbers) if mesh is None else max(mesh.shape)
        for first in range(0, len(numbers), size):
            yield mesh, numbers[first : first + size]


def _update(gradient: Any, buffer: Any, options: Mapping[str, Any]) -> DTensor:
    """Return what torch is about to orthogonalise, without changing the momentum."""
    buffer = buffer.lerp(gradient, 1 - options["momentum"])
    made: DTensor = gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
    return made


def _shared_out(
    updates: Sequence[DTensor],
    mesh: DeviceMesh,
    orthogonalise: Orthogonalise,
    options: Mapping[str, Any],
    config: ParallelismConfig,
    rank: int,
) -> list[DTensor]:
    """Orthogonalise each update on one rank, and return this rank's parts of the results.

    The ranks along the largest dimension of the mesh share the work. Along the others, ranks repeat it.
    """
    dimension = max(range(mesh.ndim), key=mesh.size)
    turn = mesh.get_local_rank(dimension)
    own = None
    for number, update in enumerate(updates):
        whole = update.full_tensor()
        if number == turn:
            arguments = options["ns_coefficients"], options["ns_steps"], options["eps"]
            own = orthogonalise(whole, *arguments).contiguous()
    parts = []
    for number, update in enumerate(updates):
        result = own if number == turn else None
        if result is None:  # Muon computes in bf16, whatever the dtype of the weights
            result = torch.empty(update.shape, dtype=torch.bfloat16, device=update.device)
        dist.broadcast(result, group=mesh.get_group(dimension), group_src=number)
        parts.append(_part(result, update, config, rank))
    return parts


def _part(whole: torch.Tensor, update: DTensor, config: ParallelismConfig, rank: int) -> DTensor:
    """Distribute a whole tensor, which all ranks have, like an update."""
    placements = [Replicate() if isinstance(p, Partial) else p for p in update.placements]
    if tuple(placements) != update.placements:
        update = update.redistribute(placements=placements)
    part = local_part(whole, update, config, rank).contiguous()
    return DTensor.from_local(
        part,
        update.device_mesh,
        update.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
