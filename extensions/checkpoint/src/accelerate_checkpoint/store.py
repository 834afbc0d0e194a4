"""`Store`: the interface of `Storage` that saving and loading use, and helpers for addresses."""

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

#: Errors of networks and busy servers, for which another attempt may succeed.
_TRANSIENT = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
    errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
    errno.EPIPE, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip


def is_save(name: str) -> bool:
    """Return whether a name is the name of a save."""
    return _SAVE.fullmatch(name) is not None


def join(place: str, name: str) -> str:
    """Return the address of a name below a place."""
    return f"{place.rstrip('/')}/{name}" if place and name else place or name


def basename(place: str) -> str:
    """Return the last part of an address."""
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1]


class Store(Protocol):
    """Keeps the files of checkpoints. To write a store, subclass `Storage`.

    All methods may be called from several threads at once. "/" separates the parts of a name.
    """

    #: Number of files, or parts of files, that are transferred at once.
    parallel: int = 8
    #: Largest number of attempts for a request that fails with a transient error.
    attempts: int = 5

    @abstractmethod
    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        """Return the names directly below a place, or below a folder of it.

        Returns:
            Name -> size in bytes. The size is None for names with other names below them: a
            folder, or a checkpoint in a directory of checkpoints. Empty if nothing is there.
        """

    @abstractmethod
    def read(self, place: str, name: str) -> bytes:
        """Return the whole content of a small file.

        Args:
            place: address of the checkpoint.
            name: name of the file in it, such as "manifest.json".

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def write(self, place: str, name: str, source: Path, progress: Progress) -> None:
        """Store a local file under a name, replacing an older file of that name.

        Send large files in several parts at once if the store supports it. All readers of the
        store must see the file when this method returns.

        Args:
            place: address of the checkpoint.
            name: starts with the name of a save, except for weights that `save_model` exports.
            source: the file to store.
            progress: call this with the number of bytes sent since the last call.
        """

    @abstractmethod
    def publish(self, place: str, save: str, manifest: bytes) -> None:
        """Put `manifest.json` at the place, which makes the files of `save` the checkpoint.

        This must happen in one step: readers, and runs that start after this process was killed,
        find either the previous manifest or the new one. All other files are already stored.
        """

    @abstractmethod
    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file.

        The range has at least one byte and never ends after the end of the file.

        Args:
            place: address of the checkpoint.
            name: name of the file in it.
            start, stop: positions in the file.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def delete(self, place: str, name: str = "") -> None:
        """Delete a file, or a folder with everything below it. "" deletes the whole place.

        Deleting a name that does not exist is not an error.
        """

    @abstractmethod
    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Mark a save as in progress. `Storage.lock` describes this, and implements it."""

    # --- optional for a store -----------------------------------------------------------------------

    def locate(self, target: str | os.PathLike[str], *, saving: bool = False) -> str:
        """Return the place for the `target` in a script: an absolute path or URL.

        Args:
            saving: whether a checkpoint will be written there.

        Raises:
            CheckpointError: a checkpoint cannot be kept there.
        """
        return os.fspath(target)

    def path(self, place: str, name: str = "") -> Path | None:
        """Return the local path of a file, or None if files must be uploaded and fetched.

        If a store returns paths, checkpoints are written and read in place. All ranks must then
        see the same files under these paths, and `publish` must move the files of the save from
        `path(place, save)` to `path(place)`.
        """
        return None

    @abstractmethod
    def clean(self, place: str) -> None:
        """Delete the files that saves of killed processes left at a place."""

    def is_transient(self, error: Exception) -> bool:
        """Return whether another attempt may succeed after a request failed with `error`."""
        if isinstance(error, TimeoutError | ConnectionError):
            return True
        return isinstance(error, OSError) and error.errno in _TRANSIENT
