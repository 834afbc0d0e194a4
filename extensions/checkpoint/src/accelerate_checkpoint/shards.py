"""Write directories of torch.distributed.checkpoint with checksums, and read them without running code."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import io
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from accelerate_checkpoint.files import FileEntry, HashingFile, first_line
from accelerate_checkpoint.in_place import read_in_place
from accelerate_checkpoint.on_demand import fetch_missing
from accelerate_core.plugin import CheckpointError, key_matcher

if TYPE_CHECKING:
    from torch.distributed.checkpoint import (
        FileSystemReader,
        FileSystemWriter,
        LoadPlan,
        LoadPlanner,
    )
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.futures import Future

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


def shard_name_matcher(names: Collection[str]) -> Callable[[str], str]:
    """Return a function from a name in a checkpoint to the name in this run.

    Names in older checkpoints contain `_orig_mod` for modules that were compiled before `prepare`.

    Args:
        names: those of the weights, and those of the parameters in each optimizer.
    """
    match = key_matcher(names)

    def matched(name: str) -> str:
        if match(name) != name or name in names:
            return match(name)
        parameter, _, key = name.rpartition(".")  # a tensor in the state of a parameter
        return f"{match(parameter)}.{key}" if parameter else name

    return matched


def with_names(metadata: Metadata, match: Callable[[str], str]) -> Metadata:
    """Return the metadata of a checkpoint with the names that `match` returns."""
    entries = metadata.state_dict_metadata
    names = {name: match(name) for name in entries}
    if all(name == new for name, new in names.items()):
        return metadata
    storage = {
        dataclasses.replace(index, fqn=names.get(index.fqn, index.fqn)): place
        for index, place in metadata.storage_data.items()
    }
    return dataclasses.replace(
        metadata,
        state_dict_metadata={names[name]: entry for name, entry in entries.items()},
        storage_data=storage,
    )


def SafeReader(
    directory: Path, metadata: Metadata, plain: Collection[str] = ()
) -> FileSystemReader:
    """Return a reader that uses the given metadata and runs no code from the files.

    If the directory is in a checkpoint from an object store, it fetches the files that this rank
    reads and that are not there yet. A backend that reads all its shards with this reader can set
    `shards_on_demand = True`, so that a machine only fetches the shards of its own ranks.

    Args:
        plain: names of values that are not tensors. Only these may be stored as bytes, which torch would
            unpickle. They may hold plain data, as with torch's `weights_only`.

    Raises:
        CheckpointError: while reading, another value is stored as bytes.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.planner import LoadItemType

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            places = metadata.storage_data or {}
            is_bytes = [item.type == LoadItemType.BYTE_IO for item in plan.items]
            for item in compress(plan.items, is_bytes):
                if item.dest_index.fqn not in plain:
                    raise CheckpointError(
                        f"{directory / METADATA} declares {item.dest_index.fqn!r} as bytes, but it is a "
                        "tensor. Bytes may contain code, so they are not read."
                    )
            fetch_missing(
                directory, {places[item.storage_index].relative_path for item in plan.items}
            )
            others = read_in_place(directory, places, plan.items, planner)
            if plain:
                planner = cast("LoadPlanner", PlainBytes(planner))
            return super().read_data(dataclasses.replace(plan, items=others), planner)

    class PlainBytes:
        """Passes everything on to a planner, after reading bytes as plain data."""

        def __init__(self, planner: LoadPlanner) -> None:
            self._planner = planner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._planner, name)

        def load_bytes(self, item: Any, value: io.BytesIO) -> None:
            content = torch.load(value, map_location="cpu", weights_only=True)
            checked = io.BytesIO()
            torch.save(content, checked)
            checked.seek(0)
            self._planner.load_bytes(item, checked)

    return Reader(directory)


def load_shards_into(
    state: dict[str, Any],
    directory: Path,
    metadata: Metadata,
    *,
    planner: LoadPlanner | None = None,
    plain: Collection[str] = (),
    no_dist: bool = True,
) -> None:
    """Read a directory of torch.distributed.checkpoint into a state dict, in place.

    Args:
        metadata: what `read_metadata` returned.
        planner, no_dist: as for `torch.distributed.checkpoint.load`.
        plain: see `SafeReader`.

    Raises:
        CheckpointError: a file is missing or damaged, or contains something else. Other exceptions of
            torch, some of which `except Exception` does not catch, become this one.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    reader = SafeReader(directory, metadata, plain)
    try:
        with warnings.catch_warnings():
            # Untrue where ranks plan for themselves, and intended in a single process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{directory} cannot be read: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return what failed first, in one line. torch lists the tracebacks of all ranks."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    for rank, (cause, _) in failures.items():
        return f"rank {rank}: {first_line(cause)}"
    return first_line(error)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Save tensors in this thread without CRC-32 sums, which take longer than our checksum of the file.

    `torch.load` doesn't read them. In versions of torch where all threads share the setting, this has no
    effect.
    """
    before = torch.serialization.get_crc32_options()
    if not _has_own_crc32_setting():
        yield
        return
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@functools.cache
def _has_own_crc32_setting() -> bool:
    """Return whether each thread has its own setting for `torch.save`'s CRC-32."""
    before = torch.serialization.get_crc32_options()
    contextvars.copy_context().run(torch.serialization.set_crc32_options, not before)
    separate = torch.serialization.get_crc32_options() == before
    torch.serialization.set_crc32_options(before)
    return separate


def ChecksumWriter(directory: Path, entries: dict[str, FileEntry]) -> FileSystemWriter:
    """Return a writer that computes the checksums of this rank's files while it writes them.

    A function that a backend's `save_state` returns can return these entries. Rank 0 then doesn't read the
    files of all ranks to compute them.

    Args:
        entries: receives the size and the checksum of each file by name.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Files(FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            if mode != "wb":
                with super().create_stream(path, mode) as stream:
                    yield stream
                return
            file = HashingFile(Path(path))
            try:
                yield file
                entries[Path(path).name] = file.entry
            finally:
                file.close()

        def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
            super().rename(path, new_path)
            entries[Path(new_path).name] = entries.pop(Path(path).name)

    writer = dcp.FileSystemWriter(directory, sync_files=True, overwrite=False)
    writer.fs = Files()
    return writer
