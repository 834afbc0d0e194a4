"""Write files of a checkpoint, with checksums computed on the way, and read them without code."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import pickle
import re
import secrets
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash

from accelerate_core.plugin import CheckpointError

MODEL = "model"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
GRADIENTS = "gradients"
SCALER = "scaler.pt"
RNG = "random_states"
CUSTOM = "custom_checkpoint"

#: Bytes per chunk, small enough to stay in the CPU cache between hashing and writing or reading. For
#: chunks of several MB, Linux needs a third more CPU time, and sometimes takes twice as long.
CHUNK = 1 << 20

#: Called with the number of bytes since the last call.
Progress = Callable[[int], None]
#: Returns the weight of a name.
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and xxh3-128 checksum (hexadecimal) of one file."""

    size: int
    checksum: str


def numbered(stem: str, index: int, suffix: str) -> str:
    """Return `stem.suffix`, `stem_1.suffix`, `stem_2.suffix`, ..."""
    return f"{stem}{f'_{index}' if index else ''}{suffix}"


class HashingFile:
    """A new file that computes its size and checksum while it is written.

    Args:
        progress: called with the number of bytes written.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self._progress = progress
        self._file: BinaryIO = path.open("wb")
        self._hash = xxhash.xxh3_128()
        self._size = 0
        #: The system's error if a write failed. The library that writes may raise another one.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, or any object with the buffer interface."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self._hash.update(part)
            try:
                self._file.write(part)
            except OSError as error:
                # A copy, because the traceback would keep torch's writer and so this file alive.
                self.failure = OSError(error.errno, error.strerror)
                raise
            if self._progress is not None:
                self._progress(len(part))
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        """Return the descriptor, for a caller that syncs the file to disk."""
        self.flush()
        return self._file.fileno()

    @property
    def entry(self) -> FileEntry:
        """Size and checksum of what has been written so far."""
        return FileEntry(self._size, self._hash.hexdigest())

    def finish(self) -> FileEntry:
        os.fsync(self.fileno())
        return self.entry

    def close(self) -> None:
        """Close the file, even if a part of it could not be written."""
        with suppress(OSError):
            self._file.close()


def write(
    path: Path, put: Callable[[HashingFile], object], progress: Progress | None = None
) -> FileEntry:
    """Write one file with `put(file)` and sync it to disk. Return its size and checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = HashingFile(path, progress)
    try:
        put(file)
        return file.finish()
    except Exception as error:
        failure = file.failure or error
        if isinstance(failure, OSError):
            raise OSError(failure.errno, failure.strerror, str(path)) from error
        raise
    finally:
        file.close()


def write_torch(path: Path, state: Any, progress: Progress | None = None) -> FileEntry:
    return write(path, lambda file: torch.save(state, cast(Any, file)), progress)


def write_text(path: Path, text: str) -> FileEntry:
    return write(path, lambda file: file.write(text.encode()))


def write_beside(path: Path, put: Callable[[Path], object]) -> None:
    """Write a temporary file and rename it, so `path` is never partly written."""
    beside = path.with_name(f".{path.name}.saving-{secrets.token_hex(6)}")
    try:
        put(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
    read: Read | None = None,
) -> FileEntry:
    """Write tensors in the safetensors format one at a time, without a copy of all of them.

    The library's own writer only takes a path, so its file would have to be read back to compute
    the checksum. Format: https://github.com/huggingface/safetensors#format

    Args:
        read: returns the tensor of a name, for tensors that are on the meta device.

    Raises:
        CheckpointError: the format does not support the dtype of a tensor.
    """
    text, order, _ = _header(tensors, metadata)

    def put(file: HashingFile) -> None:
        file.write(text)
        for name in order:
            tensor = tensors[name]
            if tensor.numel():
                tensor = with_data(name, tensor, read)
                host = tensor.detach().cpu().contiguous().reshape(-1)
                # Reads the tensor's memory without needing NumPy.
                file.write((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr()))

    return write(path, put, progress)


def with_data(name: str, value: Any, read: Read | None) -> Any:
    """Return the value. If it is a tensor on the meta device, return what `read` finds for it."""
    if read is None or not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    found = read(name)
    if (found.shape, found.dtype) != (value.shape, value.dtype):
        raise CheckpointError(
            f"{name!r} should be {value.dtype} of shape {tuple(value.shape)}, but its stored copy "
            f"is {found.dtype} of shape {tuple(found.shape)}."
        )
    return found


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset of each tensor after it, and the size of all tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset, starts = 0, {}
    # Dtypes with larger elements come first, so that every tensor is aligned.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
    ):
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"safetensors cannot store {name!r} of dtype {tensor.dtype}; save with "
                "safe_serialization=False."
            )
        starts[name], offset = offset, offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], offset],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts, offset


def create_safetensors(
    path: Path, like: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Create a safetensors file whose tensors are not written yet.

    Args:
        like: tensors on the meta device with the shapes and dtypes to create.
    """
    text, _, size = _header(like, metadata)
    with path.open("wb") as file:
        file.write(text)
        file.truncate(len(text) + size)


def starts_in_file(like: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, int]:
    """Return where each tensor starts in a file that `create_safetensors` created."""
    text, starts, _ = _header(like, metadata)
    return {name: len(text) + start for name, start in starts.items()}


def map_safetensors(path: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Create a safetensors file and return its tensors, mapped into memory, for you to fill in.

    Args:
        like: tensors on the meta device with the shapes and dtypes to create.
    """
    text, starts, size = _header(like, {"format": "pt"})
    with path.open("w+b") as file:
        file.write(text)
        file.truncate(len(text) + size)
        file.flush()
        memory = mmap.mmap(file.fileno(), len(text) + size)
    made = {}
    for name, start in starts.items():
        one = like[name]
        count = one.numel()
        if count:
            begin = len(text) + start
            flat = torch.frombuffer(memory, dtype=one.dtype, count=count, offset=begin)
            made[name] = flat.view(one.shape)
        else:
            made[name] = torch.empty(one.shape, dtype=one.dtype)
    return made


def checksum(path: Path, progress: Progress | None = None) -> FileEntry:
    """Read a file and return its size and checksum. `progress` is called with the bytes read."""
    digest = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                break
            digest.update(buffer[:count])
            size += count
            if progress is not None:
                progress(count)
    return FileEntry(size, digest.hexdigest())


#: Errors of systems that cannot sync a directory. All others mean that the names may be lost.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EROFS}


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk, if the system supports it.

    Raises:
        OSError: the disk reported an error.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows cannot open directories; others may only be written to
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def read(
    path: Path,
    *,
    trust: bool | None = None,
    allowed: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> Any:
    """Load a file that torch wrote. By default, it may only hold tensors and plain containers.

    Args:
        trust: True also runs pickled code, for files that you wrote yourself. None means that
            `load_state(trust=True)` does not apply to this file.
        allowed: context entered while reading, such as `torch.serialization.safe_globals`.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than plain data.
    """
    try:
        _refuse_packed(path)
        with allowed or nullcontext():
            return torch.load(path, **{"map_location": "cpu", **options, "weights_only": not trust})
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint {path.parent} has no {path.name}.") from None
    except pickle.UnpicklingError as error:
        way = (
            "are never loaded from this file"
            if trust is None
            else "are not loaded by default: pass trust=True to load_state if you wrote this "
            "checkpoint yourself"
        )
        found = re.search(
            r"(?:Unsupported|Trying to load unsupported) (?:global|GLOBAL)[: ]*(?:GLOBAL )?(\S+)",
            str(error),
        )
        what = f"Python objects ({found[1]})" if found else "Python objects"
        raise CheckpointError(f"{path} is damaged or contains {what}, which {way}.") from error
    except CheckpointError:
        raise
    except Exception as error:  # torch raises almost any type for a damaged file
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


def _refuse_packed(path: Path) -> None:
    """Refuse a zip file that holds more than its size: torch never compresses what it writes."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        held = sum(entry.file_size for entry in archive.infolist())
    if held > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged: it unpacks to {held} bytes.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
