"""Weights as they lie in a file: mapped into memory, read when they are used, and let go again."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint.weights import iter_state_dict
from accelerate_core.errors import CheckpointError

#: https://github.com/huggingface/safetensors#format. Formats of less than a byte have no dtype.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
#: Since Linux 5.14: map all pages of a range now, reading those that are not in the cache.
_MADV_POPULATE_READ = 22


def stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or written to."""
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


class MappedFile:
    """The tensors of a safetensors file, without a copy. Writing to one does not change the file.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is missing, cut off or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt"):  # checks the header against the file
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
            self.path, self.stamp = path, stamp(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read the weights of {path}: {error}.") from None
        self.start = 8 + length
        self.entries = {name: about for name, about in header.items() if name != "__metadata__"}
        self._made: dict[str, torch.Tensor] = {}
        self._bytes = torch.UntypedStorage.from_file(str(path), False, self.stamp[1])

    def names(self) -> list[str]:
        """Return the names of its tensors, in the order in which they lie."""
        return sorted(self.entries, key=lambda name: self.entries[name]["data_offsets"][0])

    def get(self, name: str) -> torch.Tensor | None:
        """Return a tensor by name; None if it is not there or cannot be mapped as it lies."""
        if name in self._made:
            return self._made[name]
        about = self.entries.get(name)
        dtype = None if about is None else _DTYPES.get(about["dtype"])
        if about is None or dtype is None:
            return None
        begin = self.start + about["data_offsets"][0]
        if begin % dtype.itemsize:
            return None
        shape = about["shape"]
        strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        storage = self._bytes[begin : self.start + about["data_offsets"][1]]
        made = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
        # Kept: small objects made in every forward break the heap into pieces between activations.
        self._made[name] = made
        return made

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name, mapped if it can be.

        Raises:
            CheckpointError: the file has none of that name, or it cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        found = self.get(name)
        if found is not None:
            return found
        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {name!r} of {self.path}: {error}.") from None
        return tensor


class MappedTorchFile:
    """The tensors of a file that `torch.save` wrote as a state dict, as `MappedFile` has them."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamp = path, stamp(path)
        self._state = dict(iter_state_dict(path))

    def names(self) -> list[str]:
        """Return the names of its tensors, in the order in which they were saved."""
        return list(self._state)

    def get(self, name: str) -> torch.Tensor | None:
        """Return a tensor by name; None if it cannot be mapped."""
        mapped = zipfile.is_zipfile(self.path)
        found = self._state.get(name) if mapped else None
        return found if found is None or found.is_contiguous() else None

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name.

        Raises:
            CheckpointError: the file has none of that name.
        """
        if name not in self._state:
            raise CheckpointError(f"Cannot read {name!r} of {self.path}: it has no such tensor.")
        return self._state[name]


class PlainFile:
    """A file of one tensor's bytes and nothing else, as `offload_weight` writes it."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: Sequence[int]) -> None:
        count = math.prod(shape)
        size = path.stat().st_size if path.is_file() else -1
        if size < count * dtype.itemsize:
            found = f"has {size} bytes" if size >= 0 else "does not exist"
            raise CheckpointError(
                f"The offloaded weight {path} {found}; {dtype} of shape {list(shape)} needs"
                f" {count * dtype.itemsize}."
            )
        self.stamp = stamp(path)
        empty = torch.empty(list(shape), dtype=dtype)
        whole = torch.from_file(str(path), False, count, dtype=dtype) if count else empty
        self._tensor = whole.reshape(list(shape))

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor, whatever its name."""
        return self._tensor

    read = get


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _advise(tensor: torch.Tensor, advice: int, *, inside: bool) -> bool:
    """Call madvise on the pages of a tensor, with `inside` only on those that are all its own."""
    if _libc is None:
        return False
    page = mmap.PAGESIZE
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if inside:
        begin, end = -(-begin // page) * page, end // page * page
    else:
        begin, end = begin // page * page, -(-end // page) * page
    if end <= begin:
        return True
    # By ctypes, which lets other threads run meanwhile.
    failed = _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return not failed


def read_in(tensor: torch.Tensor) -> None:
    """Read the pages of a mapped tensor and map them; other threads run meanwhile.

    Raises:
        OSError: the disk failed, or the file was cut off meanwhile.
    """
    if tensor.nbytes and not _advise(tensor, _MADV_POPULATE_READ, inside=False):
        # Elsewhere by touching each page once.
        tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()


def let_go(tensor: torch.Tensor) -> None:
    """Take the pages of a mapped tensor out of this process; the file has them still.

    Only for tensors of mapped files: others would lose what they hold.
    """
    if tensor.nbytes:
        _advise(tensor, getattr(mmap, "MADV_DONTNEED", 4), inside=True)
