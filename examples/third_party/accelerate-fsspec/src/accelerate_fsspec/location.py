"""Where one checkpoint is: a manifest that names the objects of its own save, put there last.

A save writes its objects under a name nobody has used before, then replaces one single object: the
manifest, or the archive that holds everything. So a checkpoint is the old one or the new one, and
needs no directory that can be renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from accelerate_core.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Manifest",
    "Location",
    "absolute",
    "checksum",
    "is_url",
    "locate",
    "new_save",
]

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20
_SAVE = re.compile(r"save-[0-9a-f]{12}")


def new_save() -> str:
    """Return a name for the objects of one save."""
    return f"save-{secrets.token_hex(6)}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        save: the folder of its objects.
        files: rank -> name -> size in bytes and SHA-256.
        facts: what the run was.
    """

    save: str
    files: dict[int, dict[str, tuple[int, str]]]
    facts: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return it as JSON that carries its own checksum."""
        text = json.dumps(
            {"format": _FORMAT, "save": self.save, "files": self.files, "facts": self.facts},
            sort_keys=True,
        )
        return json.dumps({"sha256": _hash(text.encode()), "manifest": text}).encode()

    @classmethod
    def of(cls, data: bytes) -> Manifest:
        """Read what `to_bytes` made.

        Raises:
            ValueError, KeyError: it is none, or damaged.
        """
        outer = json.loads(data)
        if _hash(outer["manifest"].encode()) != outer["sha256"]:
            raise ValueError("its checksum is wrong")
        said = json.loads(outer["manifest"])
        if said["format"] != _FORMAT:
            raise ValueError(f"it has format {said['format']}, and {_FORMAT} is what is read here")
        files = {
            int(rank): {name: (size, digest) for name, (size, digest) in named.items()}
            for rank, named in said["files"].items()
        }
        names = [name for named in files.values() for name in named]
        if not _SAVE.fullmatch(said["save"]) or not all(map(_is_inside, names)):
            raise ValueError("it names what is not its own")
        return cls(said["save"], files, said["facts"])


def _is_inside(name: str) -> bool:
    """Whether a name stays below the folder it is put into."""
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\\" not in name


def checksum(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a local file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
            size += len(part)
    return size, digest.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def locate(url: str, options: Mapping[str, Any]) -> Location:
    """Return the place of a URL: `s3://bucket/run`, `memory://run`, `zip:///tmp/run.zip`, a path.

    Args:
        options: arguments of the file system.

    Raises:
        CheckpointError: there is no such file system, or its library is not installed.
    """
    is_archive = url.startswith("zip://")
    where = url.removeprefix("zip://").removeprefix("::") if is_archive else url
    try:
        fs, root = fsspec.core.url_to_fs(where, **options)
    except Exception as error:
        raise CheckpointError(f"{url} cannot be opened: {_said(error)}") from error
    return (Archive if is_archive else Location)(url, fs, root)


class Location:
    """A checkpoint whose objects stand beside its manifest."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.url, self.fs, self.root = url, fs, root.rstrip("/")

    @property
    def for_one_process(self) -> bool:
        """Whether only one process can write here."""
        return "memory" in _protocols(self.fs)

    def write(self, folder: Path, rank: int, names: Iterable[str], save: str) -> None:
        """Write one rank's objects; nobody sees them before `publish`."""
        for name in names:
            target = f"{self.root}/{save}/{rank}/{name}"
            self._make_parent(target)
            self.fs.put_file(str(folder / name), target)

    def publish(self, manifest: Manifest, folder: Path) -> None:
        """Put the manifest in its place, which makes it the checkpoint; remove the one before.

        Args:
            folder: an empty directory of this machine.

        Raises:
            CheckpointError: an object of another rank is not seen from here.
        """
        for rank, named in manifest.files.items():
            for name, (size, _) in named.items():
                target = f"{self.root}/{manifest.save}/{rank}/{name}"
                self.fs.invalidate_cache(self.fs._parent(target))
                if not self.fs.exists(target) or self.fs.size(target) != size:
                    raise CheckpointError(
                        f"rank 0 does not see {target}, which rank {rank} wrote: all ranks have to "
                        "write to the same file system"
                    )
        (folder / MANIFEST).write_bytes(manifest.to_bytes())
        self._replace(folder / MANIFEST, f"{self.root}/{MANIFEST}")
        for path in self.fs.ls(self.root, detail=False):  # of earlier saves, and of killed ones
            name = str(path).rstrip("/").rpartition("/")[2]
            if _SAVE.fullmatch(name) and name != manifest.save:
                self.discard(name)

    def _replace(self, source: Path, target: str) -> None:
        """Put one object in its place in one go, also where files are written piece by piece."""
        self._make_parent(target)
        self.fs.put_file(str(source), f"{target}.part")
        self.fs.mv(f"{target}.part", target)
        self.fs.invalidate_cache()

    def _make_parent(self, target: str) -> None:
        self.fs.makedirs(self.fs._parent(target), exist_ok=True)

    def discard(self, save: str) -> None:
        """Remove the objects of a save."""
        with suppress(FileNotFoundError):
            self.fs.rm(f"{self.root}/{save}", recursive=True)

    def remove(self) -> None:
        """Remove the checkpoint: the manifest first, so that what is left is none."""
        self.fs.rm_file(f"{self.root}/{MANIFEST}")
        self.fs.rm(self.root, recursive=True)

    def manifest(self) -> Manifest:
        """Return what the checkpoint consists of.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        with self._reading(MANIFEST), self._opened() as (fs, prefix):
            return Manifest.of(fs.cat_file(f"{prefix}{MANIFEST}"))

    def fetch(self, manifest: Manifest, folder: Path, wanted: Any, verify: bool) -> None:
        """Bring objects to `folder/<rank>/<name>`.

        Args:
            wanted: tells by rank and name whether an object is needed.
            verify: False compares sizes only.

        Raises:
            CheckpointError: one is missing or damaged, by name.
        """
        with self._opened() as (fs, prefix):
            for rank, named in manifest.files.items():
                for name, (size, digest) in named.items():
                    if not wanted(rank, name):
                        continue
                    target = folder / str(rank) / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with self._reading(f"{rank}/{name}"):
                        source = f"{prefix}{manifest.save}/{rank}/{name}"
                        with fs.open(source, "rb") as file, target.open("wb") as out:
                            shutil.copyfileobj(file, out, _CHUNK)
                    found = checksum(target)
                    if found[0] != size:
                        raise CheckpointError(
                            f"{self.url}: {rank}/{name} has {found[0]} bytes instead of {size}."
                        )
                    if verify and found[1] != digest:
                        raise CheckpointError(f"{self.url}: {rank}/{name} is damaged.")

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError:
            what = (
                f"There is no checkpoint {self.url}"
                if name == MANIFEST
                else f"The checkpoint {self.url} is damaged"
            )
            raise CheckpointError(f"{what}: it has no {name}.") from None
        except Exception as error:  # whatever a file system raises
            raise CheckpointError(f"{self.url}: {name} cannot be read: {_said(error)}.") from error

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        """Open for reading; return the file system and what stands before the names."""
        self.fs.invalidate_cache()
        yield self.fs, f"{self.root}/"


class Archive(Location):
    """A checkpoint that is one zip file, built here and put in its place whole."""

    _built: Path | None = None

    @property
    def for_one_process(self) -> bool:
        """Whether only one process can write here."""
        return True

    def write(self, folder: Path, rank: int, names: Iterable[str], save: str) -> None:
        """Build the archive beside the folder."""
        self._built = folder.with_name(f"{folder.name}.zip")
        archive = fsspec.filesystem("zip", fo=str(self._built), mode="w")
        try:
            for name in names:
                archive.put_file(str(folder / name), f"{save}/{rank}/{name}")
        finally:
            _close(archive)

    def publish(self, manifest: Manifest, folder: Path) -> None:
        """Add the manifest, and put the archive in its place."""
        assert self._built is not None
        archive = fsspec.filesystem("zip", fo=str(self._built), mode="a")
        try:
            archive.pipe_file(MANIFEST, manifest.to_bytes())
        finally:
            _close(archive)
        self._replace(self._built, self.root)
        self.discard(manifest.save)

    def discard(self, save: str) -> None:
        """Remove what was built."""
        if self._built is not None:
            self._built.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the archive."""
        self.fs.rm_file(self.root)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, str]]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            raise CheckpointError(f"There is no checkpoint {self.url}.")
        try:
            with self.fs.open(self.root, "rb") as file:
                archive = fsspec.filesystem("zip", fo=file)
                try:
                    yield archive, ""
                finally:
                    _close(archive)
        except CheckpointError:
            raise
        except Exception as error:  # no archive, or one that is cut off
            raise CheckpointError(f"{self.url} cannot be read: {_said(error)}.") from error


def _close(archive: Any) -> None:
    """Finish an archive and give its file back."""
    archive.close()
    archive.fo.close()


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _said(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def is_url(target: str) -> bool:
    """Whether a text is a URL and no path."""
    return "://" in target


def absolute(target: str) -> str:
    """Return a local path from the root, a URL as it is."""
    return target if is_url(target) else os.path.abspath(os.path.expanduser(target))
