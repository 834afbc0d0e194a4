"""Read directories of torch.distributed.checkpoint without executing pickled code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate_core.plugin import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

#: The file with the metadata of a directory.
METADATA = ".metadata"


#: The classes in torch's metadata. Nothing else is unpickled.
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
        module = "pathlib" if module == "pathlib._local" else module  # written by Python 3.13
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in {METADATA}")


def read_metadata(directory: Path) -> Metadata:
    """Return the metadata of a directory. Only classes on an allow-list are unpickled.

    Raises:
        CheckpointError: it is missing or damaged, or contains another class.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, or not metadata of torch.distributed.checkpoint: {error}"
        ) from error
    return metadata


def SafeReader(directory: Path, metadata: Metadata) -> FileSystemReader:
    """Return a reader of tensors that uses the given metadata.

    Only load tensors with it: torch would unpickle entries of bytes.
    """
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

    return Reader(directory)
