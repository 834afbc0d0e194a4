"""Make one model of weights in shards: safetensors with an index, or torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from accelerate_core.checkpoint.files import first_line
from accelerate_core.checkpoint.manifest import MANIFEST, problems, read_manifest
from accelerate_core.checkpoint.model import save_weights
from accelerate_core.errors import CheckpointError
from accelerate_core.helpers.weights import checkpoint_files, load_state_dict

__all__ = ["merge_weights"]

#: Torch's file that describes a directory of its distributed checkpoints.
_METADATA = ".metadata"


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
    if distributed is not None:
        state = _read_distributed(distributed)
    else:
        parts = checkpoint_files(source)
        if (source / MANIFEST).exists():
            manifest = read_manifest(source)
            wrong = problems(source, manifest)
            wrong += [
                f"{one} is not in {MANIFEST}." for one in parts if one.name not in manifest.files
            ]
            if wrong:
                raise CheckpointError(wrong[0])
        state = {}
        for path in parts:
            try:
                state.update(load_state_dict(path))
            except (
                SafetensorError,
                RuntimeError,
                OSError,
                EOFError,
                pickle.UnpicklingError,
            ) as error:
                raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    save_weights(state, output, max_shard_size=1 << 62, safe_serialization=safe_serialization)
    if remove:
        shutil.rmtree(source)
    return output / ("model.safetensors" if safe_serialization else "pytorch_model.bin")


def _distributed(source: Path) -> Path | None:
    places = [source, *sorted(path for path in source.iterdir() if path.is_dir())]
    found = [path for path in places if (path / _METADATA).is_file()]
    if len(found) > 1 and found[0] != source:
        models = [path for path in found if "optim" not in path.name]
        if len(models) != 1:
            names = ", ".join(path.name for path in found)
            raise CheckpointError(f"{source} holds several checkpoints: {names}. Name one.")
        found = models
    return found[0] if found else None


#: What torch's metadata consists of; nothing else is unpickled.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint._extension", "StreamTransformExtension"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in {_METADATA}")


def _read_distributed(directory: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    path = directory / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or no metadata of torch's: {error}") from error

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return cast(Metadata, metadata)

    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # bytes would be unpickled
    }
    try:
        dcp.load(state, storage_reader=Reader(directory), no_dist=True)
    except Exception as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
    names = set(state)
    for prefix in ("model.", "app.model."):  # how the peer, and torch's examples, nest it
        if names and all(name.startswith(prefix) for name in names):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
            break
    return state
