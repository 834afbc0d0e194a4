"""Make one model of weights in shards: safetensors with an index, or torch.distributed.checkpoint."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from accelerate_checkpoint.files import (
    first_line,
    map_safetensors,
    sync_directory,
    write_torch,
)
from accelerate_checkpoint.manifest import MANIFEST, Manifest, problems, read_manifest
from accelerate_checkpoint.model import save_weights
from accelerate_checkpoint.shards import METADATA, SafeReader, read_metadata
from accelerate_checkpoint.weights import checkpoint_files, load_state_dict
from accelerate_core.errors import CheckpointError

__all__ = ["merge_weights"]


def merge_weights(
    source: Path, output: Path, *, safe_serialization: bool = True, remove: bool = False
) -> Path:
    """Write the weights of `source` as one file into `output`; return the file.

    Args:
        source: a directory of `save_state` or `save_model`, or of torch.distributed.checkpoint
            (or of one directory in it).
        safe_serialization: `model.safetensors`; False: `pytorch_model.bin`.
        remove: delete `source` once the file stands.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    if remove and output.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{output} is inside of {source}, which is to be removed. Write elsewhere."
        )
    if (output / MANIFEST).exists() or output.resolve() == source.resolve():
        raise CheckpointError(
            f"{output} is a checkpoint itself, whose files would be replaced. Write elsewhere."
        )
    distributed = _distributed(source)
    manifest = read_manifest(source) if (source / MANIFEST).exists() else None
    if manifest is not None:
        wrong = problems(source, manifest)
        if wrong:
            raise CheckpointError(wrong[0])
    if distributed is not None:
        _read_distributed(distributed, output, safe_serialization)
    else:
        state = _read_weights(source, manifest)
        save_weights(state, output, max_shard_size=1 << 62, safe_serialization=safe_serialization)
    if remove:
        shutil.rmtree(source)
    return output / ("model.safetensors" if safe_serialization else "pytorch_model.bin")


def _read_weights(source: Path, manifest: Manifest | None) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path in checkpoint_files(source):
        if manifest is not None and path.name not in manifest.files:
            raise CheckpointError(f"{path} is not in {MANIFEST}.")
        try:
            state.update(load_state_dict(path))
        except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    return state


def _distributed(source: Path) -> Path | None:
    places = [source, *sorted(path for path in source.iterdir() if path.is_dir())]
    found = [path for path in places if (path / METADATA).is_file()]
    if len(found) > 1 and found[0] != source:
        models = [path for path in found if "optim" not in path.name]
        if len(models) != 1:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{source} holds several checkpoints: {names}. Name one.")
        found = models
    return found[0] if found else None


def _read_distributed(directory: Path, output: Path, safe_serialization: bool) -> None:
    """Write the weights of one model into a file that is mapped: a shard at a time is in memory."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = read_metadata(directory)
    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # bytes would be unpickled
    }
    prefix = _prefix(directory, list(entries))
    wanted = {n: e for n, e in entries.items() if n.startswith(prefix)}
    output.mkdir(parents=True, exist_ok=True)
    target = output / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    beside = target.with_name(f".{target.name}.saving-{secrets.token_hex(6)}")
    layout = {n: (tuple(e.size), e.properties.dtype) for n, e in wanted.items()}
    try:
        names = {name: name.removeprefix(prefix) for name in layout}
        mapped = map_safetensors(beside, {names[n]: one for n, one in layout.items()})
        state: dict[str, Any] = {name: mapped[names[name]] for name in layout}
        try:
            dcp.load(state, storage_reader=SafeReader(directory, metadata), no_dist=True)
        except Exception as error:
            raise CheckpointError(f"{directory} cannot be read: {error}") from error
        if safe_serialization:
            del state, mapped
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, target)
        else:
            write_torch(beside.with_suffix(".bin"), {n: t.clone() for n, t in mapped.items()})
            os.replace(beside.with_suffix(".bin"), target)
    finally:
        beside.unlink(missing_ok=True)
        beside.with_suffix(".bin").unlink(missing_ok=True)
    sync_directory(output)


def _prefix(directory: Path, names: list[str]) -> str:
    """Return what stands before the names of the one model's weights."""
    ours = sorted({match[0] for name in names if (match := re.match(r"model\.\d+\.", name))})
    if len(ours) == 1 and all(n.startswith((ours[0], "optimizer.")) for n in names):
        return ours[0]
    if len(ours) > 1 and all(n.startswith((*ours, "optimizer.")) for n in names):
        raise CheckpointError(f"{directory} holds {len(ours)} models; merge-weights takes one.")
    for prefix in ("model.", "app.model."):  # how the peer, and torch's examples, nest it
        if names and all(name.startswith(prefix) for name in names):
            return prefix
    return ""
