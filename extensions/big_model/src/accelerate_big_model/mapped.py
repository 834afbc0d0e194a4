"""Map weights from files into memory, so that they are read only when they are used."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from accelerate_checkpoint import iter_state_dict
from accelerate_core.plugin import CheckpointError

#: See https://github.com/huggingface/safetensors#format. torch has no dtypes for less than a byte.
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
#: Since Linux 5.14: map all pages of a range now, and read those that are not in the page cache.
_MADV_POPULATE_READ = 22
_MADV_HUGEPAGE = 14
_LARGE = 2 << 20  # bytes of a huge page on x86; other processors may differ
_PIECE = 8 << 20  # bytes of a file that are mapped at a time while it is read
_CACHESTAT = 451  # since Linux 6.5, the same number on all processors


def stamp(path: Path) -> tuple[int, int, int]:
    """Return values that change when a file is replaced or modified."""
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *_numbers)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _pages(
    path: Path, begin: int, length: int, file: int | None = None, shared: bool = False
) -> Any:
    """Map a part of a file for as long as the returned buffer is in use.

    The mapping is private, so that writing to it does not change the file, or shared and read-only.
    `file` is the descriptor of the file if it is already open and known to be long enough.

    On Linux this does not use Python's `mmap`, which keeps a file open for each mapping. A process may
    have only some thousand open files, and a model may have more weights.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is too short.
    """
    # Python's `open` takes three times as long.
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)) if file is None else file
    try:
        if _libc is None:
            return mmap.mmap(opened, length, access=mmap.ACCESS_COPY, offset=begin)
        if file is None and os.fstat(opened).st_size < begin + length:
            raise ValueError("the file is shorter than its header says")
        access = mmap.PROT_READ | (0 if shared else mmap.PROT_WRITE)
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        address = _libc.mmap(None, length, access, kind, opened, begin)
    finally:
        if file is None:
            os.close(opened)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_char * length).from_address(address)
    # At exit, the system unmaps the pages anyway.
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False
    return pages


class _Cache:
    """Finds out which pages of a file are in Linux's page cache, and reads others into it.

    The file is mapped as a whole. For mappings of single tensors, Linux reads small pages, and mapping
    these takes seven times as long as mapping huge pages.

    Raises:
        OSError: this Linux is too old, or the process's address space is limited.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._pages = _pages(path, 0, size, shared=True)
        self._begin = ctypes.addressof(self._pages)
        self.size = size
        if mmap.PAGESIZE == 4096:  # with larger pages, a huge page has half a gigabyte
            _libc.madvise(self._begin, size, _MADV_HUGEPAGE)
        if not _populate(self._begin, 1):
            raise OSError(errno.ENOSYS, "this version of Linux cannot map pages ahead")
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file).atexit = False

    def read(self, begin: int, end: int) -> None:
        for at in range(begin, end, _PIECE):
            _populate(self._begin + at, min(_PIECE, end - at))
            # Unmap the piece together with the pages that the system mapped around it.
            first = max(at - _PIECE, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(at + 2 * _PIECE, self.size)
            _libc.madvise(self._begin + first, last - first, mmap.MADV_DONTNEED)

    def holds(self, begin: int, end: int) -> bool:
        """Return whether a range is cached. The system only knows since Linux 6.5, for own files."""
        part = (ctypes.c_uint64 * 2)(begin, end - begin)
        found = (ctypes.c_uint64 * 5)()
        failed = _libc.syscall(_CACHESTAT, self.file, part, found, 0)
        return not failed and found[0] > (end - 1) // mmap.PAGESIZE - begin // mmap.PAGESIZE


def _map(
    path: Path, begin: int, dtype: torch.dtype, shape: Sequence[int], cache: _Cache | None = None
) -> torch.Tensor:
    """Map a part of a file as a tensor. Writing to it changes neither the file nor other mappings."""
    count = math.prod(shape)
    if not count:
        return torch.empty(list(shape), dtype=dtype)
    size = count * dtype.itemsize
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    length, file = skipped + size, None
    if cache is not None:
        file = cache.file
        if size >= _LARGE:  # extend the range to whole huge pages, which are mapped in one go
            skipped = begin % _LARGE
            end = math.ceil((begin + size) / _LARGE) * _LARGE
            length = min(end, cache.size) - begin + skipped
    pages = _pages(path, begin - skipped, length, file)
    # The tensor keeps the pages alive.
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=skipped).reshape(list(shape))


class SafetensorsFile:
    """The tensors of a safetensors file. Each read maps the tensor again.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt"):  # checks the header against the file
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
            self.path = path
            self.stamp = stamp(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read the weights in {path}: {error}.") from None
        self._start = 8 + length
        self._cache: _Cache | None = None
        self._entries = {name: about for name, about in header.items() if name != "__metadata__"}

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"][0])

    def can_map(self, name: str) -> bool:
        """Return whether a tensor can be mapped: torch must have its dtype, and it must be aligned."""
        about = self._entries[name]
        dtype = _DTYPES.get(about["dtype"])
        return dtype is not None and not (self._start + about["data_offsets"][0]) % dtype.itemsize

    def about(self, name: str) -> torch.Tensor:
        """Return a tensor of the same shape and dtype, on the meta device if it can be mapped."""
        if not self.can_map(name):
            return self.read(name)
        about = self._entries[name]
        return torch.empty(about["shape"], dtype=_DTYPES[about["dtype"]], device="meta")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name, mapped if possible.

        Raises:
            CheckpointError: the file has no tensor of that name, or can't be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            if name in self._entries and self.can_map(name):
                about = self._entries[name]
                begin = self._start + about["data_offsets"][0]
                return _map(self.path, begin, _DTYPES[about["dtype"]], about["shape"], self._cache)
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {name!r} from {self.path}: {error}.") from None
        return tensor

    #: Reading copies nothing, so it can also be used just to inspect a tensor.
    peek = read

    def is_cached(self, name: str) -> bool | None:
        """Return whether the page cache has a tensor, None if `fetch` is not supported."""
        if self._cache is None:
            with suppress(OSError, ValueError):
                self._cache = _libc and _Cache(self.path, self.stamp[1])
        return None if self._cache is None else self._cache.holds(*self._range(name))

    def fetch(self, name: str) -> None:
        """Read a tensor's part of the file into the page cache.

        Raises:
            OSError: the disk failed, or the file has been truncated.
        """
        if self.is_cached(name) is False and self._cache is not None:
            self._cache.read(*self._range(name))

    def _range(self, name: str) -> tuple[int, int]:
        begin, end = self._entries[name]["data_offsets"]
        return self._start + begin, self._start + end


class TorchFile:
    """The tensors of a state dict that `torch.save` wrote. Each read copies the tensor.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file contains no state dict.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = stamp(path)
        # Files from before torch 1.6 can't be mapped. Entries that aren't tensors are ignored.
        self._mapped = zipfile.is_zipfile(path)
        found = iter_state_dict(path)
        self._state = {name: one for name, one in found if isinstance(one, torch.Tensor)}

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order in which they were saved."""
        return list(self._state)

    def can_map(self, name: str) -> bool:
        """Return whether tensors can stay in the file."""
        return self._mapped

    def peek(self, name: str) -> torch.Tensor:
        """Return a tensor for inspection only, without a copy."""
        return self._state[name]

    about = peek

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name.

        Raises:
            CheckpointError: the file has no tensor of that name.
        """
        if name not in self._state:
            raise CheckpointError(f"Cannot read {name!r} from {self.path}: it has no such tensor.")
        # All tensors are views of one mapping, so writing to one would change later reads.
        return self._state[name].clone()


class PlainFile:
    """A file that contains only the bytes of one tensor, as `offload_weight` writes it.

    Args:
        path: the file.
        about: the tensor's `dtype` and `shape`.

    Raises:
        CheckpointError: the file is missing, or too short for the dtype and shape.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        dtype = about["dtype"]
        self.path = path
        self._shape = list(about["shape"])
        self._dtype: torch.dtype = getattr(torch, str(dtype).removeprefix("torch."))
        wanted = math.prod(self._shape) * self._dtype.itemsize
        size = path.stat().st_size if path.is_file() else -1
        if size < wanted:
            found = f"has {size} bytes" if size >= 0 else "does not exist"
            raise CheckpointError(
                f"The offloaded weight {path} {found}, but {self._dtype} of shape {self._shape} needs"
                f" {wanted} bytes."
            )
        self.stamp = stamp(path)

    def read(self, name: str = "") -> torch.Tensor:
        """Return the tensor. The name is ignored."""
        return _map(self.path, 0, self._dtype, self._shape)

    #: Reading copies nothing, so it can also be used just to inspect a tensor.
    peek = read


def _populate(begin: int, length: int) -> bool:
    """Read and map the pages of an address range. Return False if the system doesn't support this.

    ctypes releases the GIL, so other threads continue to run.

    Raises:
        OSError: the disk failed, or the file has been truncated.
    """
    if _libc is None:
        return False
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    failed = _libc.madvise(first, begin + length - first, _MADV_POPULATE_READ)
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return not failed


def read_in(tensor: torch.Tensor) -> None:
    """Read and map the pages of a mapped tensor, while other threads continue to run.

    Raises:
        OSError: the disk failed, or the file has been truncated.
    """
    if tensor.nbytes and not _populate(tensor.data_ptr(), tensor.nbytes):
        # Touch each page once.
        tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
