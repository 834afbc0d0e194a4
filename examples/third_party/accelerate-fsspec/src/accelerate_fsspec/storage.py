"""`FsspecStorage`: keeps checkpoints on any fsspec file system, or in a zip archive."""

from __future__ import annotations

import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback

from accelerate_checkpoint import MANIFEST, Storage, join
from accelerate_core.plugin import CheckpointError

__all__ = ["FsspecStorage"]

#: Clients of object stores raise their own errors if the network fails.
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "google", "gcsfs", "azure", "urllib3", "requests")
_TRANSIENT = ("timeout", "connection", "disconnected", "incomplete", "unavailable", "payload")


class FsspecStorage(Storage):
    """A store whose places are URLs or local paths.

    A `zip://` URL is one archive. A single process builds it in a temporary directory and then moves
    it to its place as a whole.

    Args:
        url: relative targets are resolved against this URL.
        options: arguments for the file system, such as `endpoint_url`.
    """

    def __init__(self, url: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._options = dict(options or {})
        #: Place -> the archive that is being built for it, named after the save.
        self._built: dict[str, Path] = {}
        self._building = threading.Lock()

    def locate(self, target: str | os.PathLike[str], *, saving: bool = False) -> str:
        """Return a URL, or an absolute path."""
        text = os.fspath(target)
        if self._url is not None and "://" not in text and not os.path.isabs(text):
            text = join(self._url, text)
        if "://" not in text:
            text = os.path.abspath(os.path.expanduser(text))
        self._open(text)  # raises for unknown file systems, and for those without their library
        return text

    def _open(self, place: str) -> tuple[Any, str]:
        """Return the file system that holds a place or its archive, and the path on it."""
        try:
            fs, path = fsspec.core.url_to_fs(place.removeprefix("zip://"), **self._options)
        except Exception as error:
            raise CheckpointError(f"{place} cannot be opened: {error}") from error
        return fs, path.rstrip("/")

    @contextmanager
    def _opened(self, place: str, name: str) -> Iterator[tuple[Any, str]]:
        """Open the file system or the archive that holds a file, for reading."""
        fs, path = self._open(place)
        fs.invalidate_cache()  # other processes write too
        built = self._built.get(place)
        if built is not None and name.partition("/")[0] == built.stem:
            fs, path = fsspec.filesystem("file"), str(built)
        if not _is_archive(place) or not fs.isfile(path):
            yield fs, path
            return
        with fs.open(path, "rb") as file:
            archive = fsspec.filesystem("zip", fo=file, skip_instance_cache=True)
            yield archive, ""
            archive.close()

    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        """Return the names in a folder."""
        with (
            self._opened(place, folder) as (fs, path),
            suppress(FileNotFoundError, NotADirectoryError),
        ):
            where = join(path, folder)
            entries = [
                one
                for one in fs.ls(where, detail=True)
                if one["name"].strip("/") != where.strip("/")  # some also list the folder itself
            ]
            # Otherwise, the entries are archives, which count as checkpoints.
            files = "zip" in fs.protocol or not _is_archive(place)
            return {
                one["name"].rstrip("/").rpartition("/")[2]: one["size"]
                if one["type"] == "file" and files
                else None
                for one in entries
            }
        return {}

    def read(self, place: str, name: str) -> bytes:
        """Return a whole file."""
        with self._opened(place, name) as (fs, path):
            return bytes(fs.cat_file(join(path, name)))

    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        """Return a part of a file."""
        with self._opened(place, name) as (fs, path):
            return bytes(fs.cat_file(join(path, name), start=start, end=stop))

    def write(self, place: str, name: str, source: Path, progress: Callable[[int], None]) -> None:
        """Upload a file. s3fs and others send large files in several parts at once."""
        fs, path = self._open(place)
        size, reported = source.stat().st_size, 0

        def report(size: int | None, value: int, **_: Any) -> None:
            nonlocal reported
            progress(value - reported)
            reported = value

        if _is_archive(place):
            if place not in self._built:
                raise CheckpointError(
                    f"{place} is an archive, which only a single process can write. Save to a "
                    "directory instead, or run one process."
                )
            with self._building, zipfile.ZipFile(self._built[place], "a") as archive:
                archive.write(source, name)
        else:
            target = join(path, name)
            fs.makedirs(fs._parent(target), exist_ok=True)
            fs.put_file(str(source), target, callback=Callback(hooks={"bytes": report}))
        progress(size - reported)  # not every file system reports its progress

    def publish(self, place: str, save: str, manifest: bytes) -> None:
        """Move the manifest, or the archive with all files, to its place."""
        fs, path = self._open(place)
        if _is_archive(place):
            with zipfile.ZipFile(self._built[place], "a") as archive:
                archive.writestr(MANIFEST, manifest)
            fs.makedirs(fs._parent(path), exist_ok=True)
            fs.put_file(str(self._built[place]), f"{path}.part")
        else:
            path = join(path, MANIFEST)
            fs.pipe_file(f"{path}.part", manifest)
        fs.mv(f"{path}.part", path)  # because files are not written in one step

    def delete(self, place: str, name: str = "") -> None:
        """Delete a file or folder. An archive can only be deleted as a whole."""
        fs, path = self._open(place)
        if name and _is_archive(place):
            return
        fs.invalidate_cache()
        with suppress(FileNotFoundError):
            fs.rm(join(path, name), recursive=True)

    def lock(self, place: str, save: str) -> AbstractContextManager[bool]:
        """Hold a lease next to the files of the save, or create a temporary archive."""
        return self._build(place, save) if _is_archive(place) else super().lock(place, save)

    @contextmanager
    def _build(self, place: str, save: str) -> Iterator[bool]:
        if place in self._built:
            yield False
            return
        with tempfile.TemporaryDirectory(prefix="accelerate-fsspec-") as folder:
            self._built[place] = Path(folder, f"{save}.zip")
            try:
                yield True
            finally:
                del self._built[place]

    def is_transient(self, error: Exception) -> bool:
        """Return whether another attempt may succeed."""
        client, name = type(error).__module__.partition(".")[0], type(error).__name__.lower()
        network = client in _CLIENTS and any(word in name for word in _TRANSIENT)
        return network or super().is_transient(error)


def _is_archive(place: str) -> bool:
    return place.startswith("zip://")
