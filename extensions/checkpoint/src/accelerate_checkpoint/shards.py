"""torch.distributed.checkpoint's directories, read without running a pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

#: Torch's file that describes a directory of its distributed checkpoints.
METADATA = ".metadata"


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
        module = "pathlib" if module == "pathlib._local" else module  # of Python 3.13
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in {METADATA}")


def read_metadata(directory: Path) -> Metadata:
    """Return what a directory says of itself, its pickle read through an allow-list.

    Raises:
        CheckpointError: it is missing, damaged, or holds anything else.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or no metadata of torch's: {error}") from error
    return metadata


def SafeReader(directory: Path, metadata: Metadata) -> FileSystemReader:
    """Return a reader of tensors that takes the metadata as it was read already.

    Bytes would be unpickled by torch: leave their names out of what is loaded.
    """
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    return Reader(directory)
