"""Write the weights of a sharded model in safetensors files, of which each rank writes its parts.

Rank 0 creates the files with their headers. All ranks then write their shards at the right places, so
nothing is gathered, and no data is written twice.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import files
from accelerate_checkpoint.draft import gather_failures, raise_any
from accelerate_checkpoint.manifest import MARK
from accelerate_checkpoint.model import publish
from accelerate_checkpoint.training_state import TrainingState
from accelerate_checkpoint.weights import shard_state_dict
from accelerate_core.plugin import CheckpointError, plain_keys


def save_in_parallel(
    state: TrainingState, model: torch.nn.Module, directory: Path, max_shard_size: int | str
) -> bool:
    """Write a sharded model with all ranks. All of them must call this.

    Returns:
        False, on every rank and without writing anything, if rank 0 has to gather the weights: they
        are not DTensors, have placements without a fixed place in the whole tensor, or the ranks do
        not share the directory.

    Raises:
        CheckpointError: a rank could not write. Raised on every rank, and older weights are unchanged.
    """
    weights = _weights(state, model)
    if weights is None or state.project.save_on_each_node:
        return False
    like = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights.items()}
    shards, index = shard_state_dict(like, max_shard_size, f"{files.MODEL}{{suffix}}.safetensors")
    first = state.process.process_index == 0
    folder = directory / f".saving-{state.collectives.broadcast_object(secrets.token_hex(6))}"
    trouble: str | None = None
    cause: Exception | None = None
    mark = {"format": "pt", MARK: "1"}
    try:
        if first:
            folder.mkdir(parents=True)
            for name, shard in shards.items():
                files.create_safetensors(folder / name, shard, mark)
    except (OSError, CheckpointError) as error:
        trouble, cause = str(error), error
    try:
        raise_any(gather_failures(state.collectives, trouble), str(directory), cause)
        if gather_failures(state.collectives, None if folder.is_dir() else "absent"):
            state.warn_once(
                f"Not all ranks can see {directory}, so rank 0 gathers the weights and writes them "
                "alone. Save to a shared file system to write in parallel."
            )
            return False
        try:
            for name, shard in shards.items():
                _write_parts(folder / name, {key: weights[key] for key in shard}, shard, mark)
        except OSError as error:
            trouble, cause = str(error), error
        raise_any(gather_failures(state.collectives, trouble), str(directory), cause)
        try:
            if first:
                made = list(shards)
                if index is not None:
                    made.append(f"{files.MODEL}.safetensors.index.json")
                    text = json.dumps(index, indent=2, sort_keys=True)
                    files.write_text(folder / made[-1], text)
                publish(folder, directory, made)
                folder.rmdir()
        except OSError as error:
            trouble, cause = str(error), error
        raise_any(gather_failures(state.collectives, trouble), str(directory), cause)
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
    return True


def _weights(state: TrainingState, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return this rank's shards by name, with one name for tied weights, or None if unsupported."""
    from torch.distributed.tensor import DTensor

    inner = state.inner(model)
    seen: set[int] = set()
    names = []
    held = plain_keys(inner, inner.state_dict(keep_vars=True))
    for name, value in held.items():
        if id(value) not in seen:
            names.append(name)
        seen.add(id(value))
    plain = state.plain_model_state(model)
    if plain.keys() != held.keys():
        return None
    found = {name: plain[name] for name in names}
    for value in found.values():
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return None
        if isinstance(value, DTensor) and not has_fixed_place(value):
            return None
    return found if any(isinstance(value, DTensor) for value in found.values()) else None


def has_fixed_place(tensor: Any) -> bool:
    """Return whether each rank's shard is one rectangle of the whole tensor."""
    from torch.distributed.tensor import Replicate, Shard

    sizes = tensor.device_mesh.shape
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate) or type(placement) is Shard:
            continue
        if type(placement).__name__ != "_StridedShard":
            return False
        # fully_shard splits what later dimensions have split. Packed layers are split in other ways.
        later = [
            size
            for size, other in zip(
                sizes[number + 1 :], tensor.placements[number + 1 :], strict=True
            )
            if type(other) is Shard and other.dim == placement.dim
        ]
        if placement.split_factor != math.prod(later) or not later:
            return False
    return True


def _write_parts(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    like: Mapping[str, torch.Tensor],
    mark: Mapping[str, str],
) -> None:
    """Write this rank's parts of one file."""
    starts = files.starts_in_file(like, mark)
    with path.open("r+b", buffering=0) as file:
        for name, tensor in weights.items():
            part = _part(tensor)
            if part is None:
                continue
            local, offset = part
            data = local.detach().cpu().contiguous()
            if not data.numel():
                continue
            flat: Any = data.view(-1).view(torch.uint8).numpy()
            raw = memoryview(flat)
            width = data.element_size()
            for whole_at, part_at, count in _runs(tensor.shape, data.shape, offset):
                file.seek(starts[name] + whole_at * width)
                rest = raw[part_at * width : (part_at + count) * width]
                while rest:
                    rest = rest[file.write(rest[: files.CHUNK]) :]
        os.fsync(file.fileno())


def _part(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]] | None:
    """Return this rank's shard and its position, or None if another rank writes it."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        writes = torch.distributed.get_rank() == 0
        return (tensor, [0] * tensor.dim()) if writes else None
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    copies = [
        place for place, how in zip(at or (), tensor.placements) if isinstance(how, Replicate)
    ]
    # If other meshes hold copies, the one with rank 0 writes.
    if at is None or any(copies) or 0 not in mesh.mesh.flatten().tolist():
        return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return tensor.to_local(), offset


def _runs(
    whole: Sequence[int], part: Sequence[int], offset: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Split a rectangle of a tensor into runs of neighbours: (start in whole, start in part, count)."""
    split = max((n for n in range(len(whole)) if whole[n] != part[n]), default=0)
    if not whole:
        yield 0, 0, 1
        return
    count = math.prod(part[split:])
    strides = [math.prod(whole[n + 1 :]) for n in range(len(whole))]
    base = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    for number, index in enumerate(itertools.product(*(range(size) for size in part[:split]))):
        start = base + sum(at * stride for at, stride in zip(index, strides, strict=False))
        yield start, number * count, count
