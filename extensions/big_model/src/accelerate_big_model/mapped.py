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
from contextlib import suppress
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
_MADV_HUGEPAGE = 14
_LARGE = 2 << 20  # bytes of a large page; on other processors than x86 it may be another
_PIECE = 8 << 20  # of a file, mapped while it is read
_CACHESTAT = 451  # since Linux 6.5; one number for all processors


def stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or written to."""
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
    """Map a part of a file, for as long as the buffer that is returned is in use.

    To be written to, which does not change the file, or shared and to be read alone. A file that is
    open, and known to be long enough, is not opened again.

    Not by Python's own `mmap` where that can be: it keeps a file open for each mapping, and a process
    may have some thousand of these, which a model's weights can be more than.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is shorter.
    """
    # `open` takes thrice the time.
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)) if file is None else file
    try:
        if _libc is None:
            return mmap.mmap(opened, length, access=mmap.ACCESS_COPY, offset=begin)
        if file is None and os.fstat(opened).st_size < begin + length:
            raise ValueError("the file is shorter than it says")
        access = mmap.PROT_READ | (0 if shared else mmap.PROT_WRITE)
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        address = _libc.mmap(None, length, access, kind, opened, begin)
    finally:
        if file is None:
            os.close(opened)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages = (ctypes.c_char * length).from_address(address)
    weakref.finalize(pages, _libc.munmap, address, length).atexit = False  # the process's end does
    return pages


class _Cache:
    """A file in Linux's cache: what of it is there, and how it comes there.

    The file is mapped as a whole: for mappings of single tensors Linux reads small pages, and mapping
    those takes seven times as long as mapping large ones.

    Raises:
        OSError: this cannot be had: by an old Linux, or within a limit on the process's addresses.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._pages = _pages(path, 0, size, shared=True)
        self._begin = ctypes.addressof(self._pages)
        self.size = size
        if mmap.PAGESIZE == 4096:  # of larger pages a large one is half a gigabyte
            _libc.madvise(self._begin, size, _MADV_HUGEPAGE)
        if not _populate(self._begin, 1):
            raise OSError(errno.ENOSYS, "this Linux cannot map pages ahead")
        self.file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.file).atexit = False

    def read(self, begin: int, end: int) -> None:
        for at in range(begin, end, _PIECE):
            _populate(self._begin + at, min(_PIECE, end - at))
            # With what the system mapped around it.
            first = max(at - _PIECE, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            last = min(at + 2 * _PIECE, self.size)
            _libc.madvise(self._begin + first, last - first, mmap.MADV_DONTNEED)

    def holds(self, begin: int, end: int) -> bool:
        """Ask the system, which answers since Linux 6.5, and for one's own files alone."""
        part = (ctypes.c_uint64 * 2)(begin, end - begin)
        found = (ctypes.c_uint64 * 5)()
        failed = _libc.syscall(_CACHESTAT, self.file, part, found, 0)
        return not failed and found[0] > (end - 1) // mmap.PAGESIZE - begin // mmap.PAGESIZE


def _map(
    path: Path, begin: int, dtype: torch.dtype, shape: Sequence[int], cache: _Cache | None = None
) -> torch.Tensor:
    """Map a part of a file. Each call has pages of its own: writing changes neither file nor others."""
    count = math.prod(shape)
    if not count:
        return torch.empty(list(shape), dtype=dtype)
    size = count * dtype.itemsize
    skipped = begin % mmap.ALLOCATIONGRANULARITY
    length, file = skipped + size, None
    if cache is not None:
        file = cache.file
        if size >= _LARGE:  # whole large pages, also at its edges, which are mapped at once
            skipped = begin % _LARGE
            end = math.ceil((begin + size) / _LARGE) * _LARGE
            length = min(end, cache.size) - begin + skipped
    pages = _pages(path, begin - skipped, length, file)
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
            self.path = path
            self.stamp = stamp(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read the weights of {path}: {error}.") from None
        self._start = 8 + length
        self._cache: _Cache | None = None
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
                return _map(self.path, begin, _DTYPES[about["dtype"]], about["shape"], self._cache)
            with safe_open(self.path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read {name!r} of {self.path}: {error}.") from None
        return tensor

    #: To look at a tensor's content nothing is copied either.
    peek = read

    def is_cached(self, name: str) -> bool | None:
        """Say whether the system's cache has a tensor, as far as is known; None if `fetch` cannot be."""
        if self._cache is None:
            with suppress(OSError, ValueError):
                self._cache = _libc and _Cache(self.path, self.stamp[1])
        return None if self._cache is None else self._cache.holds(*self._range(name))

    def fetch(self, name: str) -> None:
        """Read a tensor's part of the file into the system's cache.

        Raises:
            OSError: the disk failed, or the file was cut off meanwhile.
        """
        if self.is_cached(name) is False and self._cache is not None:
            self._cache.read(*self._range(name))

    def _range(self, name: str) -> tuple[int, int]:
        begin, end = self._entries[name]["data_offsets"]
        return self._start + begin, self._start + end


class TorchFile:
    """The tensors of a state dict that `torch.save` wrote; each is copied when it is asked for.

    Args:
        path: the file.

    Raises:
        CheckpointError: it holds no state dict.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stamp = stamp(path)
        # Mapped, but for files from before torch 1.6; what else a trainer put there is left out.
        self._mapped = zipfile.is_zipfile(path)
        found = iter_state_dict(path)
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
        self.path = path
        self._shape = list(about["shape"])
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

    #: To look at a tensor's content nothing is copied either.
    peek = read


def _populate(begin: int, length: int) -> bool:
    """Map the pages of a range of addresses, reading what is not in the cache; say whether it could be.

    By ctypes, which lets other threads run meanwhile.

    Raises:
        OSError: the disk failed, or the file was cut off meanwhile.
    """
    if _libc is None:
        return False
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    failed = _libc.madvise(first, begin + length - first, _MADV_POPULATE_READ)
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return not failed


def read_in(tensor: torch.Tensor) -> None:
    """Read the pages of a mapped tensor and map them; other threads run meanwhile.

    Raises:
        OSError: the disk failed, or the file was cut off meanwhile.
    """
    if tensor.nbytes and not _populate(tensor.data_ptr(), tensor.nbytes):
        # By touching each page once.
        tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
