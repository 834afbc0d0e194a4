"""Load whole tensors from files into DTensors. Each rank reads only the parts that it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from accelerate_checkpoint.export import has_fixed_place
from accelerate_checkpoint.weights import load_state_dict
from accelerate_core.plugin import CheckpointError, key_matcher

#: Returns a part of a whole tensor, given the range in each dimension.
Part = Callable[[tuple[slice, ...]], torch.Tensor]


@dataclass
class LoadedShards:
    """What `load_shards` has loaded.

    Attributes:
        names: the tensors that were found.
        unexpected: names in the files that the model doesn't have.
        bytes: what this rank has read of the files.
    """

    names: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    bytes: int = 0


@torch.no_grad()
def load_shards(
    state: Mapping[str, Any],
    paths: Iterable[Path],
    progress: Callable[[int], None] | None = None,
    model: torch.nn.Module | None = None,
) -> LoadedShards:
    """Copy this rank's parts of the tensors in files into a state dict, in place. Nothing is sent.

    Args:
        state: the state dict of the model, whose tensors share the model's memory.
        paths: the weight files. Others than safetensors are mapped into memory.
        progress: called with the number of bytes since the last call.
        model: the model, if parts of it may be compiled.

    Raises:
        CheckpointError: a tensor has another shape in the files, or the model's is on the meta device.
    """
    loaded = LoadedShards()
    match = key_matcher(state, model)
    for path in paths:
        for stored, shape, part in _tensors(path):
            name = match(stored)
            target = state.get(name)
            if not isinstance(target, torch.Tensor):
                loaded.unexpected.append(name)
                continue
            if target.is_meta:
                raise CheckpointError(
                    f"{name!r} of the model is on the meta device. Allocate the sharded model first, with "
                    "model.to_empty(device=...)."
                )
            if tuple(target.shape) != shape:
                raise CheckpointError(
                    f"{name} has shape {list(shape)} in {path} and {list(target.shape)} in the model."
                )
            read = _copy(target, part)
            loaded.names.add(name)
            loaded.bytes += read
            if progress is not None:
                progress(read)
    return loaded


def _copy(target: Any, part: Part) -> int:
    """Copy the part of a tensor that this rank holds, and return how many bytes were read for it."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    everything = tuple(slice(0, size) for size in target.shape)
    if not isinstance(target, DTensor):
        found = part(everything)
        target.copy_(found)
        return found.nbytes
    local = target.to_local()
    if not local.numel():
        return 0
    mesh, placements = target.device_mesh, target.placements
    if has_fixed_place(target):
        shape, offset = compute_local_shape_and_global_offset(target.shape, mesh, placements)
        found = part(tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True)))
        local.copy_(found)
        return found.nbytes
    whole = part(everything)
    # No rank sends its tensor to the others, because all have read the same one.
    own = distribute_tensor(whole.to(local.device), mesh, placements, src_data_rank=None)
    local.copy_(own.to_local())
    return whole.nbytes


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], Part]]:
    """Yield name, shape and a reader of parts for each tensor of a file."""
    if path.suffix != ".safetensors":
        for name, tensor in load_state_dict(path).items():
            yield name, tuple(tensor.shape), tensor.__getitem__
        return
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        for name in file.keys():  # noqa: SIM118 - the handle is not a mapping
            found = file.get_slice(name)
            shape = tuple(found.get_shape())
            # A slice of a tensor without dimensions cannot be taken.
            read: Part = found.__getitem__ if shape else partial(_whole, file, name)
            yield name, shape, read


def _whole(file: Any, name: str, ranges: tuple[slice, ...]) -> torch.Tensor:
    found: torch.Tensor = file.get_tensor(name)
    return found
