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
from pathlib import Path

from accelerate_checkpoint.files import sync_directory
from accelerate_checkpoint.manifest import MANIFEST, read_manifest
from accelerate_core.plugin import CheckpointError

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
    """Return the path with links resolved and `~` expanded."""
    return Path(os.path.realpath(Path(path).expanduser()))


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
    what = ""
    if Path.cwd().is_relative_to(target):
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
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        self._locked.enter_context(lock_directory(self.path))

    def publish(self) -> None:
        """Move the complete directory to its target and remove the one that it replaces."""
        for folder, _, _ in os.walk(self.path):
            sync_directory(Path(folder))
        if self.target.exists():
            swap, old = self._named("swap"), self._named("old")
            os.rename(self.path, swap)
            if _exchange(swap, self.target):
                old = swap
            else:
                os.rename(self.target, old)
                os.rename(swap, self.target)
            sync_directory(self.target.parent)
            _remove_replaced(old, self.target)
        else:
            os.rename(self.path, self.target)
        sync_directory(self.target.parent)
        self.release()

    def abandon(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        self._locked.close()


def discard(path: Path, identity: str) -> None:
    """Remove a directory. It is renamed first, so it never appears incomplete under its name."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.deleted-{identity}")
    os.rename(path, gone)
    shutil.rmtree(gone)


def clean_up(parent: Path) -> None:
    """Finish or remove the saves in `parent` that were interrupted because their run died."""
    if not parent.is_dir():
        return
    left = [(match, path) for path in parent.iterdir() if (match := _LEFT.fullmatch(path.name))]
    for match, path in sorted(left, key=lambda pair: pair[0]["stage"] != "swap"):
        try:
            if time.time() - path.stat().st_mtime < _MADE and not any(path.iterdir()):
                continue  # another run may be about to lock it
            with lock_directory(path) as locked:
                if not locked and time.time() - path.stat().st_mtime < _STALE:
                    continue
                target = parent / match["name"]
                if match["stage"] in ("saving", "deleted"):
                    shutil.rmtree(path, ignore_errors=True)
                elif target.exists():
                    _remove_replaced(path, target)
                else:
                    os.rename(path, target)
        except OSError as error:  # another process does the same, or the directory is read-only
            logger.debug("%s was not cleaned up: %s", path, error)


#: Files of a checkpoint, ours or Accelerate's. They are removed together with the checkpoint.
_CHECKPOINT_FILE = re.compile(
    r"(pytorch_)?model(_\d+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|(optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin|scaler\.pt"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|gradients_\d+\.bin|backend_.+"
)


def _remove_replaced(old: Path, target: Path) -> None:
    """Remove a replaced checkpoint. Files that others put into it move to the new one."""
    try:
        manifest = read_manifest(old)
        listed = {Path(name).parts[0] for name in manifest.files} | {MANIFEST, manifest.folder}
    except CheckpointError:
        listed = set()
    for entry in old.iterdir():
        there = target / entry.name
        kept = entry.name not in listed and _CHECKPOINT_FILE.fullmatch(entry.name) is None
        if kept and not there.exists():
            os.rename(entry, there)
    shutil.rmtree(old)


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
