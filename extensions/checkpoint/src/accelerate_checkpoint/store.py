"""`Store`: what saving and loading use of a `Storage`, and how names below a place are formed."""

from __future__ import annotations

import errno
import os
import re
from abc import abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from accelerate_checkpoint.files import Progress

_SAVE = re.compile(r"save-[0-9a-f]{12}")

#: What a network or a busy server causes. Trying again may help.
_TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
    errno.EPIPE, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip


def is_save(name: str) -> bool:
    """Return whether a name is one that a save gets."""
    return _SAVE.fullmatch(name) is not None


def join(place: str, name: str) -> str:
    """Return the address of something below a place."""
    return f"{place.rstrip('/')}/{name}" if place and name else place or name


def basename(place: str) -> str:
    """Return the last part of an address."""
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1]


class Store(Protocol):
    """Keeps the files of checkpoints; authors of one subclass `Storage`.

    All methods may be called from several threads at once. Names have "/" between their parts.
    """

    #: How many files, or parts of files, are transferred at once.
    parallel: int = 8
    #: How often something that failed for a passing reason is tried in all.
    attempts: int = 5

    @abstractmethod
    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        """Return what is directly below a place, or below a folder of it.

        Returns:
            Name -> size in bytes; None for what has names below it: a folder, or a checkpoint in a
            directory of checkpoints. Empty if there is nothing.
        """

    @abstractmethod
    def read(self, place: str, name: str) -> bytes:
        """Return the whole content of a small file.

        Args:
            place: of the checkpoint.
            name: of the file in it, such as "manifest.json".

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def write(self, place: str, name: str, source: Path, progress: Progress) -> None:
        """Store a local file under a name, replacing what was there.

        Send large files in several parts at once if the store can. When this returns, everyone
        who reads from the store sees the file.

        Args:
            place: of the checkpoint.
            name: begins with the name of a save, except for weights that `save_model` exports.
            source: the file to store.
            progress: call it with the number of bytes sent since the last call.
        """

    @abstractmethod
    def publish(self, place: str, save: str, manifest: bytes) -> None:
        """Put `manifest.json` at the place, which makes the files of `save` the checkpoint.

        This has to happen in one step: a reader, and a run that starts after this process was
        killed, finds either the previous manifest or this one. Everything else is stored already.
        """

    @abstractmethod
    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file: at least one, none beyond its size.

        Args:
            place: of the checkpoint.
            name: of the file in it.
            start, stop: positions in the file.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def delete(self, place: str, name: str = "") -> None:
        """Delete a file, a folder with everything below it, or with "" the whole place.

        Deleting what is not there is not an error.
        """

    @abstractmethod
    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Mark a save as under way for as long as the block runs and this process lives.

        The context manager returns False, and marks nothing, if another save has the mark and its
        process may be alive. That distinguishes the leftovers of a killed process from a save that
        another process is still writing.

        Args:
            place: of the checkpoint.
            save: name of the save.
        """

    # --- a store may change these as well ----------------------------------------------------------

    def locate(self, target: str | os.PathLike[str], *, saving: bool = False) -> str:
        """Return the place that a script means by `target`: an absolute path or URL.

        Args:
            saving: a checkpoint is to be written there.

        Raises:
            CheckpointError: no checkpoint can be kept there.
        """
        return os.fspath(target)

    def path(self, place: str, name: str = "") -> Path | None:
        """Return where a file is on this machine, or None if it has to be uploaded and fetched.

        A store that returns paths is written and read in place. All ranks have to see the same
        files under these paths, and `publish` has to move the files of the save, which are below
        `path(place, save)`, to `path(place)`.
        """
        return None

    @abstractmethod
    def clean(self, place: str) -> None:
        """Delete what saves of killed processes left at a place."""

    def is_transient(self, error: Exception) -> bool:
        """Return whether something that failed with `error` is worth another attempt."""
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        return isinstance(error, OSError) and error.errno in _TRANSIENT
