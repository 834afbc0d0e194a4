"""Merge sharded weights (safetensors with an index, or torch.distributed.checkpoint) into one file."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint.files import map_safetensors, sync_directory, write_beside, write_torch
from accelerate_checkpoint.manifest import MANIFEST, problems, read_manifest
from accelerate_checkpoint.model import read_files, save_weights
from accelerate_checkpoint.progress import byte_bar
from accelerate_checkpoint.shards import METADATA, load_shards_into, read_metadata
from accelerate_checkpoint.weights import checkpoint_files, load_state_dict
from accelerate_core.plugin import CheckpointError


def merge_weights(
    source: Path, output: Path, *, safe_serialization: bool = True, remove: bool = False
) -> Path:
    """Write the weights of `source` as one file into `output`. Return the path of the file.

    Args:
        source: a directory that `save_state`, `save_model` or torch.distributed.checkpoint wrote,
            or one with such a directory in it.
        safe_serialization: write `model.safetensors`. If False, write `pytorch_model.bin`.
        remove: delete `source` after the file was written.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    if remove and output.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{output} is inside {source}, which you asked to remove. Choose another output "
            "directory."
        )
    refuse_checkpoint(output, source)
    target = output / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    manifest = read_manifest(source) if (source / MANIFEST).exists() else None
    files = source if manifest is None else source / manifest.folder
    distributed = _distributed(files)
    if manifest is not None:
        with byte_bar(f"Verifying {source.name}", manifest.size) as advance:
            wrong = problems(files, manifest, progress=advance)
        if wrong:
            raise CheckpointError(wrong[0])
    if distributed is not None:
        _merge_distributed(distributed, target, safe_serialization)
    else:
        paths = checkpoint_files(files)
        for path in paths:
            if manifest is not None and path.name not in manifest.files:
                raise CheckpointError(f"{path} is not in {MANIFEST}.")
        state = read_files(paths, load_state_dict)
        save_weights(state, output, max_shard_size=1 << 62, safe_serialization=safe_serialization)
    if remove:
        shutil.rmtree(source)
    return target


def refuse_checkpoint(output: Path, source: Path | None = None) -> None:
    """Raise an error if `output` is a checkpoint or is `source`."""
    same = source is not None and output.resolve() == source.resolve()
    if same or (output / MANIFEST).exists():
        raise CheckpointError(
            f"{output} is itself a checkpoint, and merging would overwrite its files. Choose "
            "another output directory."
        )


def _distributed(source: Path) -> Path | None:
    places = [source, *sorted(path for path in source.iterdir() if path.is_dir())]
    found = [path for path in places if (path / METADATA).is_file()]
    if len(found) > 1 and found[0] != source:
        models = [path for path in found if "optim" not in path.name]
        if len(models) != 1:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(
                f"{source} contains several checkpoints: {names}. Pass the path of one of them."
            )
        found = models
    return found[0] if found else None


def _merge_distributed(directory: Path, target: Path, safe_serialization: bool) -> None:
    """Write the weights of one model. For safetensors, one shard at a time is in memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_metadata(directory)
    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # bytes would be unpickled
    }
    prefix = _prefix(directory, list(entries))
    empty = {
        name.removeprefix(prefix): torch.empty(
            entry.size, dtype=entry.properties.dtype, device="meta"
        )
        for name, entry in entries.items()
        if name.startswith(prefix)
    }

    class Counting(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            advance(tensor.nbytes)

    def put(path: Path) -> None:
        merged = (
            map_safetensors(path, empty)
            if safe_serialization
            else {name: torch.empty_like(like, device="cpu") for name, like in empty.items()}
        )
        state = {f"{prefix}{name}": tensor for name, tensor in merged.items()}
        load_shards_into(state, directory, metadata, planner=Counting())
        if not safe_serialization:
            write_torch(path, merged)
            return
        del state, merged  # unmaps the file; Windows cannot rename a mapped one
        with path.open("rb") as file:
            os.fsync(file.fileno())

    target.parent.mkdir(parents=True, exist_ok=True)
    with byte_bar(f"Merging {directory.name}", sum(t.nbytes for t in empty.values())) as advance:
        write_beside(target, put)
    sync_directory(target.parent)


def _prefix(directory: Path, names: list[str]) -> str:
    """Return the prefix of the names of the model's weights."""
    ours = sorted({match[0] for name in names if (match := re.match(r"model\.\d+\.", name))})
    if len(ours) == 1 and all(n.startswith((ours[0], "optimizer.")) for n in names):
        return ours[0]
    if len(ours) > 1 and all(n.startswith((*ours, "optimizer.")) for n in names):
        raise CheckpointError(
            f"{directory} contains {len(ours)} models, but merge-weights can only merge one."
        )
    for prefix in ("model.", "app.model."):  # used by Accelerate and by torch's examples
        if names and all(name.startswith(prefix) for name in names):
            return prefix
    return ""
