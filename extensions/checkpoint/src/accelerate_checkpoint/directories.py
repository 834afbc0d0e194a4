"""Directories that appear complete or not at all, and cleanup after runs that died while saving.

A directory NAME is written as `.NAME.saving-ID` next to its target. If the target does not exist
yet, the directory is renamed to it. Otherwise it is first renamed to `.NAME.swap-ID`, which marks
it as complete, and then the two are exchanged in one system call. On file systems without this
call, the old directory is renamed to `.NAME.old-ID` instead. A directory to be removed is first
renamed to `.NAME.deleted-ID`, so a partly deleted directory never has the original name.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from accelerate_checkpoint.files import sync_directory
from accelerate_checkpoint.manifest import MANIFEST, read_manifest
from accelerate_core.plugin import CheckpointError, warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<stage>saving|swap|old|deleted)-(?P<id>[0-9a-f]{12})")

#: Seconds after which a directory that cannot be locked (NFS, Windows) counts as a leftover.
_STALE = 6 * 3600
#: Seconds that a process may take to lock a directory after creating it.
_MADE = 5.0


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with links resolved and `~` expanded.

    Raises:
        CheckpointError: the path is relative, and the current directory was deleted.
    """
    expanded = Path(path).expanduser()
    try:
        return Path(os.path.realpath(expanded))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is relative to the current directory, which was deleted. Pass an absolute path."
        ) from None


def _current_directory() -> Path | None:
    """Return the current directory, or None if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def target_of(output_dir: str | os.PathLike[str]) -> Path:
    """Return the real path of a directory that a save will create or replace.

    Raises:
        CheckpointError: a rename cannot replace it, because it is a file, a mount point, or the
            current directory or one of its parents.
    """
    if not isinstance(output_dir, str | os.PathLike):
        raise CheckpointError(f"save_state needs the path of a directory, not {output_dir!r}.")
    target = real_path(output_dir)
    if target.is_file():
        raise CheckpointError(f"save_state needs a directory, but {target} is a file.")
    if target.is_symlink():  # a loop, because all other links were resolved
        raise CheckpointError(f"save_state cannot write to {target}, a link that points to itself.")
    what = ""
    current = _current_directory()
    if current is not None and current.is_relative_to(target):
        what = "or contains the current directory"
    elif os.path.ismount(target):
        what = "a mount point"
    if what:
        raise CheckpointError(
            f"{target} is {what}, so a checkpoint cannot replace it in one step. Save to a "
            f"directory inside it, such as {target / 'state'}."
        )
    return target


class SaveInProgress:
    """The directory `path` that a save writes to. It stays locked while its process lives.

    Args:
        target: the path that the directory gets when it is complete.
        identity: 12 hexadecimal digits, the same on all ranks.
    """

    def __init__(self, target: Path, identity: str) -> None:
        self.target = target
        self.identity = identity
        self.path = self._named("saving")
        self._locked = ExitStack()

    def _named(self, stage: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{stage}-{self.identity}")

    def make(self) -> None:
        make_directory(self.target.parent)
        self.path.mkdir()
        self._locked.enter_context(lock_directory(self.path))

    def publish(self) -> None:
        """Move the complete directory to its target and remove what it replaces."""
        for folder, _, _ in os.walk(self.path):
            sync_directory(Path(folder))
        replaced = None
        with ExitStack() as held:
            if os.path.lexists(self.target):
                # A reader that cleans up must leave the replaced directory to this process.
                held.enter_context(lock_directory(self.target))
                replaced = self._replace()
            else:
                os.rename(self.path, self.target)
            sync_directory(self.target.parent)
            if replaced is not None:
                self._remove(replaced)
        self.release()

    def _replace(self) -> Path:
        """Put the directory in the place of the target; return the new path of the old target."""
        swap, old = self._named("swap"), self._named("old")
        os.rename(self.path, swap)
        if _exchange(swap, self.target):
            return swap
        os.rename(self.target, old)
        os.rename(swap, self.target)
        return old

    def _remove(self, replaced: Path) -> None:
        try:
            _remove_replaced(replaced, self.target)
            sync_directory(self.target.parent)
        except OSError as error:  # the new checkpoint is complete; the next save tries again
            warn(f"The replaced checkpoint {replaced} cannot be removed: {error}")

    def abandon(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        self._locked.close()


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and sync their names to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)


def discard(path: Path, identity: str) -> None:
    """Remove a directory. It is renamed first, so it never appears incomplete under its name.

    A link is removed, and what it points to is left alone.
    """
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.deleted-{identity}")
    with lock_directory(path):  # a reader that cleans up must leave it to this process
        os.rename(path, gone)
        remove_tree(gone)


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it, or a link. Entries that vanish meanwhile are fine."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another process removes the same directory


def clean_up(parent: Path) -> None:
    """Finish or remove the saves in `parent` that were interrupted because their run died."""
    try:
        names = os.listdir(parent)
    except OSError:  # it does not exist, or this process may not read it
        return
    leftovers = [match for name in names if (match := _LEFT.fullmatch(name))]
    for match in sorted(leftovers, key=lambda match: match["stage"] != "swap"):
        path = parent / match.string
        try:
            if not path.is_symlink():  # no save makes links
                _clean_leftover(path, match["stage"], parent / match["name"])
        except OSError as error:  # another process does the same, or the directory is read-only
            logger.debug("%s was not cleaned up: %s", path, error)


def _clean_leftover(path: Path, stage: str, target: Path) -> None:
    if time.time() - path.stat().st_mtime < _MADE and not any(path.iterdir()):
        return  # another run may be about to lock it
    with lock_directory(path) as locked:
        if not locked and time.time() - path.stat().st_mtime < _STALE:
            return
        if stage in ("saving", "deleted"):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(target):
            _remove_replaced(path, target)
        else:
            os.rename(path, target)


#: Names of checkpoint files, ours or Accelerate's.
_CHECKPOINT_FILE = re.compile(
    r"(pytorch_)?model(_\d+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|gradients_\d+\.bin|backend_.+"
)


def _remove_replaced(old: Path, target: Path) -> None:
    """Remove a replaced checkpoint. Files that its manifest does not list move to the new one."""
    if old.is_symlink() or not old.is_dir():
        old.unlink(missing_ok=True)
        return
    moved = _move_unlisted(old, target, _listed_files(old))
    remove_tree(old)
    unclear = sorted(name for name in moved if _CHECKPOINT_FILE.fullmatch(name))
    if unclear:
        more = f" and {len(unclear) - 3} more" if len(unclear) > 3 else ""
        warn(
            f"{target} contained {', '.join(unclear[:3])}{more}, which no {MANIFEST} lists. The save "
            "kept them, but load_state does not read them. Delete them if you don't need them."
        )


def _listed_files(directory: Path) -> set[str]:
    """Return the paths of the files in a directory that belong to its checkpoint."""
    try:
        manifest = read_manifest(directory)
    except CheckpointError:
        if not (directory / MANIFEST).is_file():
            return set()
        # A damaged manifest: a checkpoint was here, and only the names tell which files it had.
        names = [name for name in os.listdir(directory) if _CHECKPOINT_FILE.fullmatch(name)]
        return {MANIFEST, *names}
    return {MANIFEST, *(str(PurePosixPath(manifest.folder, name)) for name in manifest.files)}


def _move_unlisted(old: Path, target: Path, listed: set[str], folder: str = "") -> list[str]:
    """Move the files below a folder that are not listed; return the names of what was moved."""
    moved = []
    for entry in sorted((old / folder).iterdir()):
        name = f"{folder}/{entry.name}" if folder else entry.name
        if name in listed:
            continue
        destination = target / name
        is_folder = entry.is_dir() and not entry.is_symlink()
        has_listed = is_folder and any(path.startswith(f"{name}/") for path in listed)
        if is_folder and (has_listed or destination.is_dir()):
            moved += _move_unlisted(old, target, listed, name)
        elif not os.path.lexists(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.rename(entry, destination)
            moved.append(name)
    return moved


@contextmanager
def lock_directory(path: Path) -> Iterator[bool]:
    """Lock a directory. Yields False if another process holds the lock or locks don't work here."""
    with ExitStack() as held:
        locked = False
        if fcntl is not None:
            with suppress(OSError):
                handle = os.open(path, os.O_RDONLY)
                held.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
        yield locked


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories atomically. Returns False if the system cannot do that."""
    if sys.platform != "linux":
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here = _AT_FDCWD
    if call(here, os.fsencode(one), here, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
