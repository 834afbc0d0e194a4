"""Weights on their way from rank 0 to the shards, one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from accelerate_core import ParallelismConfig
from accelerate_core.errors import PrepareError

__all__ = [
    "broadcast_whole",
    "check_alike",
    "check_models",
    "fill_from_rank_0",
    "local_part",
    "on_meta",
    "take_off",
    "whole",
]


def on_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model has no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def take_off(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the model to the meta device in place, ties kept; return what it held, by name."""
    held: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held |= dict(model.named_buffers(remove_duplicate=False))
    memo: dict[int, torch.Tensor] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            made: torch.Tensor = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
        return memo[id(tensor)]

    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = empty(tensor)  # type: ignore[assignment]
    return {name: tensor.detach() for name, tensor in held.items()}


def check_models(model: nn.Module) -> None:
    """Compare what the ranks want to prepare, before the first collective on its weights.

    Raises:
        PrepareError: names, shapes, dtypes or what is trained differ; on every rank.
    """
    own = {
        name: (tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in _tensors(model).items()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, other in enumerate(every):
        for name in {**every[0], **other}:
            first, here = every[0].get(name), other.get(name)
            if first != here:
                raise PrepareError(
                    f"The ranks prepare different models: {name!r} is {first or 'missing'} on rank "
                    f"0 and {here or 'missing'} on rank {rank} (shape, dtype, trained)."
                )


@torch.no_grad()
def broadcast_whole(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, before they are sharded."""
    for tensor in _tensors(model).values():
        if not isinstance(tensor, DTensor):  # distributed by whoever made it
            _send(tensor)


def _send(tensor: torch.Tensor) -> None:
    plain = tensor.detach()
    whole = plain.contiguous()
    dist.broadcast(whole.view(-1).view(torch.uint8) if whole.numel() else whole.view(-1), 0)
    if whole.data_ptr() != plain.data_ptr():
        plain.copy_(whole)


@torch.no_grad()
def check_alike(model: nn.Module) -> None:
    """Compare the ranks' weights by checksums.

    Raises:
        PrepareError: they differ; the text has the first name.
    """
    sums = {
        name: _checksum(t)
        for name, t in _tensors(model).items()
        if t.numel() and not isinstance(t, DTensor)
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sums)
    for rank, other in enumerate(every):
        differ = [name for name in every[0] if other.get(name) != every[0][name]]
        if differ:
            raise PrepareError(
                f"{len(differ)} weights of rank {rank} are not those of rank 0, such as "
                f"{differ[0]!r}, and sync_module_states=False forbids to send them. Set the same "
                "seed on all ranks, or leave sync_module_states out."
            )


def _checksum(tensor: torch.Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# --- shards ---------------------------------------------------------------------------------------


def _coordinate(config: ParallelismConfig, dimension: str, rank: int) -> int:
    """Return a rank's index in a dimension of the mesh, or in one made of several."""
    names = ("dp_shard", "cp", "sp") if dimension == "dp_shard_cp" else (dimension,)
    return config.shard(rank, names)[0]


def local_part(
    tensor: torch.Tensor, like: DTensor, config: ParallelismConfig, rank: int
) -> torch.Tensor:
    """Return the part of a whole tensor that a rank holds of one distributed as `like`."""
    mesh = like.device_mesh
    names = mesh.mesh_dim_names or ()
    strided, plain = [], []
    for number, placement in enumerate(like.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is Shard:
            plain.append((number, placement.dim))
        elif type(placement).__name__ == "_StridedShard":
            strided.append((number, placement.dim))  # type: ignore[attr-defined]
        else:
            raise TypeError(f"No part of a tensor placed as {placement}.")
    # A strided shard is a shard of what the dimensions after it have sharded already.
    for number, dim in [*plain, *strided]:
        parts = torch.chunk(tensor, mesh.size(number), dim)
        index = _coordinate(config, names[number], rank)
        tensor = parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


@torch.no_grad()
def fill_from_rank_0(
    model: nn.Module,
    source: Mapping[str, torch.Tensor] | None,
    config: ParallelismConfig,
    device: torch.device,
) -> None:
    """Fill every parameter's shard, and every buffer, from the whole tensors of rank 0.

    Each rank receives its own part only; beside its shards it holds one parameter at a time.

    Args:
        source: whole tensors by name, on rank 0.
    """
    names = {id(t): name for name, t in reversed(list(model.named_parameters()))}
    for parameter in model.parameters():
        name = names[id(parameter)]
        whole = None if source is None else source[name]
        if isinstance(parameter, DTensor):
            _scatter(parameter, whole, config, device)
        else:
            _give(parameter, whole)
    for name, buffer in model.named_buffers():
        _give(buffer, None if source is None else source[name])


def _give(tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
    if whole is not None:
        tensor.detach().copy_(whole)
    _send(tensor)


def _scatter(
    parameter: DTensor, whole: torch.Tensor | None, config: ParallelismConfig, device: torch.device
) -> None:
    local = parameter.to_local()
    size = dist.get_world_size()
    pieces: list[torch.Tensor] | None = None
    # Every rank knows every part's size: the parts of a meta tensor cost nothing.
    shadow = torch.empty(parameter.shape, device="meta")
    sizes = [local_part(shadow, parameter, config, rank).numel() for rank in range(size)]
    room = max(sizes)
    if whole is not None:
        pieces = []
        for rank in range(size):
            part = local_part(whole.to(parameter.dtype), parameter, config, rank)
            padded = torch.zeros(room, dtype=parameter.dtype, device=device)
            padded[: part.numel()] = part.reshape(-1)
            pieces.append(padded)
    got = torch.empty(room, dtype=parameter.dtype, device=device)
    dist.scatter(got, pieces, src=0)
    local.copy_(got[: local.numel()].view(local.shape))


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its parts; all ranks of its mesh call this."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    made: torch.Tensor = sharded.full_tensor()
    return made
