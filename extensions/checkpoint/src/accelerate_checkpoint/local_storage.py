"""Checkpoints on local disks, or on a file system that all machines mount."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate_checkpoint.directories import (
    SaveInProgress,
    clean_up,
    discard,
    lock_directory,
    make_directory,
    real_path,
    remove_tree,
    target_of,
)
from accelerate_checkpoint.files import Progress, write_text
from accelerate_checkpoint.manifest import MANIFEST
from accelerate_checkpoint.storage import Storage, is_save
from accelerate_core.plugin import CheckpointError, find, warn

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_url(target: object) -> bool:
    """Return whether a target is a URL, such as "s3://bucket/run", rather than a path."""
    return isinstance(target, str) and _URL.match(target) is not None


def refuse_url(target: str | os.PathLike[str] | None) -> None:
    """Raise an error for a URL, which names the plugin that keeps checkpoints there."""
    text = os.fspath(target) if isinstance(target, str | os.PathLike) else ""
    if not is_url(text):
        return
    find("checkpointer", "object_store", source=text)
    raise CheckpointError(
        f"{text} is a URL, but the checkpointer 'directory' writes to local disks. To keep "
        f"checkpoints there, pass Accelerator(project_dir={text!r}), or choose the checkpointer "
        "with Accelerator(checkpointer='object_store')."
    )


class LocalStorage(Storage):
    """Keeps checkpoints in directories that are written in place and published by a rename.

    Until then, the files of a save are in the directory `.NAME.saving-ID` next to the place.
    """

    def __init__(self) -> None:
        #: The saves in progress in this process.
        self._saves: dict[tuple[str, str], SaveInProgress] = {}
        #: The links that lead nowhere and have been warned about.
        self._broken_links: set[Path] = set()

    def locate(self, target: str | os.PathLike[str], *, saving: bool = False) -> str:
        """Return the real path, with links and `~` resolved.

        Raises:
            CheckpointError: the target is a URL, or a save cannot replace a file, a mount point or the
                current directory.
            MissingPluginError: the target is a URL, and no plugin for object stores is installed.
        """
        refuse_url(target)
        return str(target_of(target) if saving else real_path(target))

    def path(self, place: str, name: str = "") -> Path:
        """Return the path of a file. Files of a save are in its hidden directory."""
        save, _, rest = name.partition("/")
        if is_save(save):
            return self._begun(place, save).path / rest
        return Path(place, name)

    def _begun(self, place: str, save: str) -> SaveInProgress:
        known = self._saves.get((place, save))
        return known or SaveInProgress(Path(place), save.removeprefix("save-"))

    def list(self, place: str, folder: str = "") -> dict[str, int | None]:
        """Return the names in a directory, without links that lead nowhere."""
        path = self.path(place, folder)
        names: dict[str, int | None] = {}
        try:
            entries = [*path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:
                if entry.is_symlink():
                    self._warn_about_link(entry)
                continue  # otherwise, another process has just removed it
            names[entry.name] = None if stat.S_ISDIR(status.st_mode) else status.st_size
        return names

    def _warn_about_link(self, link: Path) -> None:
        if link not in self._broken_links:
            self._broken_links.add(link)
            warn(f"{link} is skipped, because it is a link that leads nowhere.")

    def read(self, place: str, name: str) -> bytes:
        """Return the content of a file."""
        return self.path(place, name).read_bytes()

    def write(self, place: str, name: str, source: Path, progress: Progress) -> None:
        """Copy a file and sync it to disk."""
        path = self.path(place, name)
        make_directory(path.parent)
        shutil.copyfile(source, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        progress(path.stat().st_size)

    def publish(self, place: str, save: str, manifest: bytes) -> None:
        """Rename the directory of the save to the place. This replaces an older checkpoint."""
        saving = self._begun(place, save)
        write_text(saving.path / MANIFEST, manifest.decode())
        saving.publish()

    def fetch(self, place: str, name: str, start: int, stop: int) -> bytes:
        """Read a part of a file."""
        with self.path(place, name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def delete(self, place: str, name: str = "") -> None:
        """Delete a file or directory. A whole place is renamed first, so it vanishes in one step."""
        path = self.path(place, name)
        if is_save(name):
            self._begun(place, name).abandon()
        elif not name and (path.exists() or path.is_symlink()):
            discard(path, secrets.token_hex(6))
        elif path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, place: str, save: str) -> Iterator[bool]:
        """Create and lock the directory of a save. The lock ends when the process dies."""
        saving = SaveInProgress(Path(place), save.removeprefix("save-"))
        if saving.path.exists():
            with lock_directory(saving.path) as locked:
                yield locked
            return
        saving.make()
        self._saves[place, save] = saving
        try:
            yield True
        finally:
            saving.release()
            del self._saves[place, save]

    def clean(self, place: str) -> None:
        """Finish or remove the saves of killed runs next to a place."""
        clean_up(Path(place).parent)
