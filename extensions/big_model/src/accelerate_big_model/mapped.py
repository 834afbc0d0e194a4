"""Weights as they lie in a file: mapped into memory, and read when they are used."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import sys
import weakref
import zipfile
from collections.abc import Mapping, Sequence
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


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *_numbers)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _pages(path: Path, begin: int, length: int) -> Any:
    """Map a part of a file, for as long as the buffer that is returned is in use.

    Not by Python's own `mmap` where that can be: it keeps a file open for each mapping, and a process
    may have some thousand of these, which a model's weights can be more than.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is shorter.
    """
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # `open` takes thrice the time
    try:
        if _libc is None:
            return mmap.mmap(file, length, access=mmap.ACCESS_COPY, offset=begin)
        if os.fstat(file).st_size < begin + length:
            raise ValueError("the file is shorter than it says")
        how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
        address = _libc.mmap(None, length, *how, file, begin)
    finally:
        os.close(file)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_char * length).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False  # the process's end does
    return pages


def _map(path: Path, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Map a part of a file. Each call has pages of its own: writing changes neither file nor others."""
    count = math.prod(shape)
    if not count:
        return torch.empty(list(shape), dtype=dtype)
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    pages = _pages(path, begin - skipped, skipped + count * dtype.itemsize)
    # The tensor holds the pages, and lets them go when it goes.
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=skipped).reshape(list(shape))


class SafetensorsFile:
    """The tensors of a safetensors file, each mapped anew when it is asked for.

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
        self._start = 8 + length
        self._entries = {name: about for name, about in header.items() if name != "__metadata__"}

    def names(self) -> list[str]:
        """Return the names of its tensors, in the order in which they lie."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"][0])

    def can_map(self, name: str) -> bool:
        """Say whether a tensor can be used as it lies: it has a dtype of torch, and is aligned."""
        about = self._entries[name]
        dtype = _DTYPES.get(about["dtype"])
        return dtype is not None and not (self._start + about["data_offsets"][0]) % dtype.itemsize

    def about(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype, on meta if it can be mapped."""
        if not self.can_map(name):
            return self.read(name)
        about = self._entries[name]
        return torch.empty(about["shape"], dtype=_DTYPES[about["dtype"]], device="meta")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name, mapped if it can be.

        Raises:
            CheckpointError: the file has none of that name, or it cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            if name in self._entries and self.can_map(name):
                about = self._entries[name]
                begin = self._start + about["data_offsets"][0]
                return _map(self.path, begin, _DTYPES[about["dtype"]], about["shape"])
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {name!r} of {self.path}: {error}.") from None
        return tensor

    #: To look at a tensor's content nothing is copied either.
    peek = read


class TorchFile:
    """The tensors of a state dict that `torch.save` wrote; each is copied when it is asked for.

    Args:
        path: the file.

    Raises:
        CheckpointError: it holds no state dict.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.stamp = path, stamp(path)
        # Mapped, but for files from before torch 1.6; what else a trainer put there is left out.
        self._mapped, found = zipfile.is_zipfile(path), iter_state_dict(path)
        self._state = {name: one for name, one in found if isinstance(one, torch.Tensor)}

    def names(self) -> list[str]:
        """Return the names of its tensors, in the order in which they were saved."""
        return list(self._state)

    def can_map(self, name: str) -> bool:
        """Say whether a tensor can stay in the file."""
        return self._mapped

    def peek(self, name: str) -> torch.Tensor:
        """Return a tensor to look at: shape, dtype and parts of its content."""
        return self._state[name]

    about = peek

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name.

        Raises:
            CheckpointError: the file has none of that name.
        """
        if name not in self._state:
            raise CheckpointError(f"Cannot read {name!r} of {self.path}: it has no such tensor.")
        # Views on one mapping: whoever wrote into one would change the next one read.
        return self._state[name].clone()


class PlainFile:
    """A file of one tensor's bytes and nothing else, as `offload_weight` writes it.

    Args:
        path: the file.
        about: `dtype` and `shape`.

    Raises:
        CheckpointError: the file is missing or shorter than dtype and shape demand.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        dtype = about["dtype"]
        self.path, self._shape = path, list(about["shape"])
        self._dtype: torch.dtype = getattr(torch, str(dtype).removeprefix("torch."))
        wanted = math.prod(self._shape) * self._dtype.itemsize
        size = path.stat().st_size if path.is_file() else -1
        if size < wanted:
            found = f"has {size} bytes" if size >= 0 else "does not exist"
            raise CheckpointError(
                f"The offloaded weight {path} {found}; {self._dtype} of shape {self._shape} needs"
                f" {wanted}."
            )
        self.stamp = stamp(path)

    def read(self, name: str = "") -> torch.Tensor:
        """Return the tensor, whatever its name."""
        return _map(self.path, 0, self._dtype, self._shape)


def read_in(tensor: torch.Tensor) -> None:
    """Read the pages of a mapped tensor and map them; other threads run meanwhile.

    Raises:
        OSError: the disk failed, or the file was cut off meanwhile.
    """
    if not tensor.nbytes:
        return
    if _libc is not None:
        page = mmap.PAGESIZE
        begin = tensor.data_ptr() // page * page
        length = tensor.data_ptr() + tensor.nbytes - begin
        # By ctypes, which lets other threads run meanwhile.
        if not _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_READ):
            return
        if ctypes.get_errno() == errno.EFAULT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    # Elsewhere by touching each page once.
    tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
