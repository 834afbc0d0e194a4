"""Send weights from rank 0 to the shards, one parameter at a time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_checkpoint import collective_device
from accelerate_core.plugin import ParallelismConfig, PrepareError
from accelerate_fsdp2 import quantized
from accelerate_fsdp2.gradients import local


def move_if_needed(model: nn.Module, device: torch.device) -> None:
    """Move a model to devices on which `fully_shard` can't move it by assigning `parameter.data`."""
    there = torch.empty(0, device=device)
    if not torch._has_compatible_shallow_copy_type(torch.empty(0), there):
        model.to(device)


def on_meta(model: nn.Module) -> bool:
    """Return whether any parameter of the model is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def take_off(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the model to the meta device in place, keeping ties. Returns its tensors by name."""
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


def check_models(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks prepare the same model, before the first collective on its weights.

    Raises:
        PrepareError: names, shapes, dtypes or trainable parameters differ. Raised on every rank.
    """
    own = {
        name: (tuple(t.shape), str(t.dtype), t.requires_grad)
        for name, t in _tensors_and_scales(model).items()
    }
    if found := _differences(own, group):
        rank, (name, *_), first, other = found
        raise PrepareError(
            f"The ranks prepare different models: {name!r} is {first.get(name, 'missing')} on rank "
            f"0 and {other.get(name, 'missing')} on rank {rank} (shape, dtype, requires_grad)."
        )


def refuse_shared(model: nn.Module, owners: Any) -> None:
    """Reject a model that shares a parameter with another, and remember its parameters.

    Args:
        owners: parameter -> weak reference to its model.

    Raises:
        PrepareError: a parameter belongs to another model. Each would train its own copy.
    """
    for name, parameter in model.named_parameters():
        reference = owners.get(parameter)
        owner = None if reference is None else reference()
        if owner is not None and owner is not model:
            raise PrepareError(
                f"{name!r} of {type(model).__name__} is also a parameter of "
                f"{type(owner).__name__}. The two models are sharded separately, so each would "
                "train its own copy. Put both models into one module and prepare that."
            )
        owners[parameter] = weakref.ref(model)


@torch.no_grad()
def broadcast_whole(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Send rank 0's parameters and buffers to all ranks, before they are sharded."""
    for tensor in _tensors_and_scales(model).values():
        if not isinstance(tensor, DTensor):  # the code that created a DTensor has distributed it
            _send(tensor, group)


def _send(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    plain = tensor.detach()
    if is_traceable_wrapper_subclass(plain):  # such as quantized weights
        for name in plain.__tensor_flatten__()[0]:
            _send(getattr(plain, name), group)
        return
    whole = plain.contiguous()
    sent = whole.view(-1).view(torch.uint8) if whole.numel() else whole.view(-1)
    dist.broadcast(sent, group=group, group_src=0)
    if whole.data_ptr() != plain.data_ptr():
        plain.copy_(whole)


@torch.no_grad()
def check_alike(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare the ranks' weights by checksum.

    Raises:
        PrepareError: they differ. The message has the first name.
    """
    sums = {
        name: _checksum(t)
        for name, t in _tensors_and_scales(model).items()
        if t.numel() and not isinstance(t, DTensor)
    }
    if found := _differences(sums, group):
        rank, names, *_ = found
        raise PrepareError(
            f"{len(names)} weights on rank {rank} differ from rank 0, such as {names[0]!r}, and "
            "sync_module_states=False prevents sending rank 0's. Set the same seed on all ranks, or "
            "leave sync_module_states out."
        )


def _differences(
    own: dict[str, Any], group: dist.ProcessGroup | None
) -> tuple[int, list[str], dict[str, Any], dict[str, Any]] | None:
    """Compare `own` between ranks. They only exchange a digest if all are equal.

    Returns:
        The first rank that differs from rank 0, the names that differ, and the values of rank 0
        and of that rank; or None if all ranks are equal.
    """
    digest = int(xxhash.xxh3_64_hexdigest(repr(own).encode()), 16) >> 1
    extremes = torch.tensor([digest, -digest], device=collective_device(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    if largest == -smallest:
        return None
    every: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    first = every[0]
    for rank, other in enumerate(every):
        if names := [name for name in first | other if first.get(name) != other.get(name)]:
            return rank, names, first, other
    return None


def _checksum(tensor: torch.Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _tensors_and_scales(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**_tensors(model), **quantized.scales_of(model)}


# --- shards ---------------------------------------------------------------------------------------


def local_part(
    tensor: torch.Tensor, like: DTensor, config: ParallelismConfig, rank: int
) -> torch.Tensor:
    """Return a rank's part of a whole tensor, if it was distributed like `like`."""
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
            raise TypeError(
                f"Cannot determine a rank's part of a tensor with placement {placement}."
            )
    # A strided shard splits what later mesh dimensions have already split.
    at = mesh.get_coordinate() if rank == dist.get_rank() else None
    for number, dim in [*plain, *strided]:
        parts = torch.chunk(tensor, mesh.size(number), dim)
        if at is not None:
            index = at[number]
        else:
            name = names[number]
            joint = ("dp_shard", "cp", "sp") if name == "dp_shard_cp" else (name,)
            index, _ = config.shard(rank, joint)
        tensor = parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


def cut(whole: torch.Tensor, like: DTensor, config: ParallelismConfig, rank: int) -> torch.Tensor:
    """Distribute a whole tensor like `like`. Each rank copies its own part."""
    made = torch.zeros_like(like, dtype=whole.dtype)
    cast(DTensor, made).to_local().copy_(local_part(whole, like, config, rank))
    return made.detach()


@torch.no_grad()
def fill_with_nan(model: nn.Module, device: torch.device) -> None:
    """Allocate a model that is on meta, and fill its weights with NaN. Real buffers are kept.

    Raises:
        PrepareError: a buffer is on meta and no checkpoint will contain it.
    """
    kept = set(model.state_dict())
    held = {name: b.detach().clone() for name, b in model.named_buffers() if not b.is_meta}
    if lost := [n for n, _ in model.named_buffers() if n not in held and n not in kept]:
        raise PrepareError(
            f"The buffer {lost[0]!r} of {type(model).__name__} is on the meta device on every rank "
            "and is not persistent, so no checkpoint contains its values. Create the model with "
            "init_empty_weights, which doesn't put buffers on meta, or create it on rank 0."
        )
    model.to_empty(device=device)
    for name, tensor in _tensors(model).items():
        if name in held:
            tensor.copy_(held[name])
        elif tensor.is_floating_point():
            local(tensor.detach()).fill_(float("nan"))


@torch.no_grad()
def fill_from_rank_0(
    model: nn.Module,
    source: Mapping[str, torch.Tensor] | None,
    config: ParallelismConfig,
    device: torch.device,
) -> None:
    """Fill the shards of all parameters, and all buffers, with rank 0's tensors.

    Each rank only receives its own part, one parameter at a time.

    Args:
        source: the whole tensors by name on rank 0, None on other ranks.
    """
    for name, parameter in model.named_parameters():
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
    own = parameter.to_local()
    ranks = range(dist.get_world_size())
    # Rank 0 has the first chunk of each dimension, and no chunk is larger than the first one.
    shadow = torch.empty(parameter.shape, device="meta")
    longest = local_part(shadow, parameter, config, 0).numel()
    pieces: list[torch.Tensor] | None = None
    if whole is not None:
        pieces = []
        for rank in ranks:
            part = local_part(whole.to(parameter.dtype), parameter, config, rank)
            padded = torch.zeros(longest, dtype=parameter.dtype, device=device)
            padded[: part.numel()] = part.reshape(-1)
            pieces.append(padded)
    got = torch.empty(longest, dtype=parameter.dtype, device=device)
    dist.scatter(got, pieces, src=0)
    own.copy_(got[: own.numel()].view(own.shape))


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. All ranks of its mesh must call this."""
    made: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return made.detach()
