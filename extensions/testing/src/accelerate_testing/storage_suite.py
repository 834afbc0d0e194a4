"""What a `Storage` of accelerate-checkpoint must do, tested without an Accelerator.

Example:
    from accelerate_testing import StorageSuite

    class TestShelf(StorageSuite):
        storage = "accelerate_shelf:ShelfStorage"
        place = "shelf://tests/{name}"
"""

from __future__ import annotations

import os
import pkgutil
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from accelerate_checkpoint import MANIFEST, Manifest, Storage

#: Seconds in which a lock counts as released after its holder was killed on the same machine.
_RELEASED = 20.0

#: Larger than what clients send in one request by default.
_LARGE = 17_000_003

#: Holds the lock of a save with one file in it, or writes files of it until it is killed.
_HOLDER = """
import sys, time
from pathlib import Path
from accelerate_testing.storage_suite import load_storage
spec, place, save, source, kind = sys.argv[1:]
storage = load_storage(spec)
with storage.lock(place, save) as locked:
    assert locked
    number = 0
    while True:
        storage.write(place, f"{save}/{number}", Path(source), lambda count: None)
        print(number, flush=True)
        number += 1
        while kind == "holds":
            time.sleep(1)
"""


def load_storage(spec: str) -> Storage:
    """Call a function or class `module:name` without arguments, and return the storage."""
    storage: Storage = pkgutil.resolve_name(spec)()
    return storage


class Shelf:
    """One store under test, and files to put into it.

    Args:
        spec: `module:name` of the class or function that returns it.
        place: an unused place, with `{path}` or `{name}` in it.
        folder: a directory for files.
        alone: whether only the process that writes to the store can read it.
    """

    def __init__(self, spec: str, place: str, folder: Path, alone: bool = False) -> None:
        self.spec = spec
        self._place = place
        self.folder = folder
        self.alone = alone
        self.storage = load_storage(spec)
        self._files = 0

    def place(self, name: str = "checkpoint") -> str:
        """Return the place of a checkpoint below an unused one."""
        below = f"{self.folder.name}-{name}" if "{path}" not in self._place else name
        text = self._place.format(path=self.folder / "store" / below, name=below)
        return self.storage.locate(text, saving=True)

    def again(self) -> Storage:
        """Return the store as another process would open it, if other processes can."""
        return self.storage if self.alone else load_storage(self.spec)

    def file(self, content: bytes) -> Path:
        """Return a local file."""
        self._files += 1
        path = self.folder / f"file_{self._files}"
        path.write_bytes(content)
        return path

    def write(self, place: str, save: str, files: dict[str, bytes]) -> None:
        """Write files of a save, and compare the reported progress."""
        for name, content in files.items():
            reported: list[int] = []
            self.storage.write(place, f"{save}/{name}", self.file(content), reported.append)
            sent = sum(reported)
            assert sent == len(content), f"write reported {sent} bytes of {len(content)} in {name}"

    def publish(self, place: str, save: str) -> bytes:
        """Publish a save and return its manifest."""
        folder = "" if self.storage.path(place) is not None else save
        data = Manifest({}, {"saved_as": save}, folder).render().encode()
        self.storage.publish(place, save, data)
        return data

    def has(self, place: str, manifest: bytes) -> None:
        """Fail unless a place has this manifest."""
        assert self.again().read(place, MANIFEST) == manifest, "the manifest is a different one"

    def kept(self, place: str, save: str, name: str) -> str:
        """Return where a file of a published save is: the files of a local save are moved."""
        return name if self.storage.path(place) is not None else f"{save}/{name}"

    def holds(self, place: str, save: str, files: dict[str, bytes]) -> None:
        """Fail unless a published save has exactly these files."""
        storage = self.again()
        for name, content in files.items():
            where = self.kept(place, save, name)
            got = storage.read(place, where)
            assert got == content, (
                f"{name}: {len(got)} bytes that differ from the {len(content)} written"
            )
            if content:
                part = storage.fetch(place, where, 0, len(content))
                assert part == content, f"fetch and read return different bytes for {name}"
        folders = {name.rpartition("/")[0] for name in files}
        for folder in folders:
            where = self.kept(place, save, folder) if folder else self.kept(place, save, "")
            listed = storage.list(place, where.rstrip("/"))
            sizes = {
                name.rpartition("/")[2]: len(content)
                for name, content in files.items()
                if name.rpartition("/")[0] == folder
            }
            got_sizes = {name: listed.get(name, "nothing") for name in sizes}
            assert got_sizes == sizes, f"list returned the sizes {got_sizes} instead of {sizes}"


def new_save() -> str:
    """Return an unused name for a save."""
    return f"save-{secrets.token_hex(6)}"


_SMALL = {"model.bin": b"weights" * 100, "backend_x/rank_0.bin": b"0", "empty.bin": b""}


def appears_whole(shelf: Shelf) -> None:
    """A save is invisible before it is published, and complete afterwards."""
    place, save = shelf.place(), new_save()
    with shelf.storage.lock(place, save) as locked:
        assert locked, "lock returned False for a new save"
        shelf.write(place, save, _SMALL)
        with pytest.raises(FileNotFoundError):
            shelf.again().read(place, MANIFEST)
        assert MANIFEST not in shelf.again().list(place), "the manifest is listed too early"
        manifest = shelf.publish(place, save)
    shelf.has(place, manifest)
    shelf.holds(place, save, _SMALL)


def replaces_whole(shelf: Shelf) -> None:
    """The earlier checkpoint can be read until the next one is published."""
    place = shelf.place()
    old = new_save()
    new = new_save()
    with shelf.storage.lock(place, old):
        shelf.write(place, old, _SMALL)
        manifest = shelf.publish(place, old)
    other = {"model.bin": b"other weights", "more.bin": b"more"}
    with shelf.storage.lock(place, new):
        shelf.write(place, new, other)
        shelf.has(place, manifest)
        shelf.holds(place, old, _SMALL)
        manifest = shelf.publish(place, new)
    shelf.has(place, manifest)
    shelf.holds(place, new, other)


def publishes_in_one_step(shelf: Shelf) -> None:
    """While a large save is published, readers find the manifest of the earlier one or the new one."""
    place, old, new = shelf.place(), new_save(), new_save()
    if shelf.storage.path(place) is not None:
        pytest.skip("local saves become visible by renaming")
    with shelf.storage.lock(place, old):
        shelf.write(place, old, _SMALL)
        manifests = {shelf.publish(place, old)}
    with shelf.storage.lock(place, new):
        shelf.write(place, new, {"large.bin": random.Random(0).randbytes(_LARGE)})
        with _Reader(shelf, place) as reader:
            manifests.add(shelf.publish(place, new))
    assert not reader.failed, f"reading the manifest while a save was published: {reader.failed!r}"
    assert reader.seen <= manifests, "a reader got neither the earlier manifest nor the new one"


class _Reader:
    """A thread that reads a manifest again and again."""

    def __init__(self, shelf: Shelf, place: str) -> None:
        self.seen: set[bytes] = set()
        self.failed: Exception | None = None
        self._storage, self._place = shelf.storage, place
        self._first, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        self._first.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def _read(self) -> None:
        while not self._stopped.is_set() and self.failed is None:
            try:
                self.seen.add(self._storage.read(self._place, MANIFEST))
            except Exception as error:
                if not self._storage.is_transient(error):
                    self.failed = error
            self._first.set()


def large_files(shelf: Shelf) -> None:
    """A large file is returned unchanged, even in several parts at the same time."""
    place, save = shelf.place(), new_save()
    content = random.Random(0).randbytes(_LARGE)
    with shelf.storage.lock(place, save):
        shelf.write(place, save, {"large.bin": content})
        shelf.publish(place, save)
    name, step = shelf.kept(place, save, "large.bin"), 3_000_001
    starts = range(0, _LARGE, step)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda start: shelf.storage.fetch(place, name, start, min(start + step, _LARGE)), starts
        )
        assert b"".join(parts) == content, "the parts of a file differ from the written bytes"


def many_at_once(shelf: Shelf) -> None:
    """All files exist that several threads write at the same time."""
    place, save = shelf.place(), new_save()
    files = {f"part_{number}.bin": os.urandom(1000 + number) for number in range(24)}
    with shelf.storage.lock(place, save):
        sources = {name: shelf.file(content) for name, content in files.items()}
        with ThreadPoolExecutor(shelf.storage.parallel) as pool:
            jobs = [
                pool.submit(
                    shelf.storage.write, place, f"{save}/{name}", source, lambda count: None
                )
                for name, source in sources.items()
            ]
            for job in jobs:
                job.result()
        shelf.publish(place, save)
    shelf.holds(place, save, files)


def lists_checkpoints(shelf: Shelf) -> None:
    """The directory of several checkpoints lists them by name, without deleted ones."""
    places = {name: shelf.place(name) for name in ("checkpoint_1", "checkpoint_2")}
    names = {name: place.rstrip("/").rpartition("/")[2] for name, place in places.items()}
    parent = places["checkpoint_1"].rstrip("/").rpartition("/")[0]
    assert shelf.storage.list(places["checkpoint_1"]) == {}, "an empty place is not empty"
    for place in places.values():
        save = new_save()
        with shelf.storage.lock(place, save):
            shelf.write(place, save, _SMALL)
            shelf.publish(place, save)
    listed = shelf.again().list(parent)
    for name in names.values():
        assert name in listed, f"{name} is not listed"
        assert listed[name] is None, f"{name} is a folder, so its size must be None"
    shelf.storage.delete(places["checkpoint_1"], MANIFEST)
    shelf.storage.delete(places["checkpoint_1"])
    listed = shelf.again().list(parent)
    assert names["checkpoint_1"] not in listed, "a deleted checkpoint is listed"
    assert names["checkpoint_2"] in listed, "another checkpoint was deleted"


def deletes(shelf: Shelf) -> None:
    """Deleting removes only the named files; deleting a missing file is not an error."""
    place = shelf.place()
    save = new_save()
    half = new_save()
    with shelf.storage.lock(place, save):
        shelf.write(place, save, _SMALL)
        shelf.publish(place, save)
    with shelf.storage.lock(place, half):
        shelf.write(place, half, {"half.bin": b"half"})
        shelf.storage.delete(place, half)
    assert "half.bin" not in shelf.again().list(place, half), "a deleted save is listed"
    shelf.holds(place, save, _SMALL)
    shelf.storage.delete(place, half)
    shelf.storage.delete(place)
    with pytest.raises(FileNotFoundError):
        shelf.again().read(place, MANIFEST)
    assert shelf.again().list(place) == {}, "deleted files are listed"
    shelf.storage.delete(place)


def absent_files(shelf: Shelf) -> None:
    """Reading a missing file raises FileNotFoundError, which is not retried."""
    place, save = shelf.place(), new_save()
    for _ in range(2):
        for name in (MANIFEST, "save-0123456789ab/model.bin"):
            with pytest.raises(FileNotFoundError):
                shelf.storage.read(place, name)
            with pytest.raises(FileNotFoundError):
                shelf.storage.fetch(place, name, 0, 10)
        with shelf.storage.lock(place, save):
            shelf.write(place, save, {"model.bin": b"1"})
            if _ == 0:
                shelf.storage.delete(place, save)
    assert not shelf.storage.is_transient(FileNotFoundError("gone"))
    assert not shelf.storage.is_transient(PermissionError("not yours"))
    assert shelf.storage.is_transient(TimeoutError("slow"))
    assert shelf.storage.is_transient(ConnectionResetError("reset"))


def locks(shelf: Shelf) -> None:
    """A running save is locked for others, and released when it has ended."""
    place, save = shelf.place(), new_save()
    with shelf.storage.lock(place, save) as locked:
        assert locked
        shelf.write(place, save, {"model.bin": b"1"})
        with shelf.again().lock(place, save) as again:
            assert not again, "a second lock of the same save succeeded"
        shelf.storage.clean(place)
        names = shelf.storage.list(place, save)
        assert "model.bin" in names, "clean deleted a running save"
        shelf.storage.delete(place, save)
    with shelf.storage.lock(place, save) as locked:
        assert locked, "the lock was not released after the save"
        shelf.storage.delete(place, save)


def killed_while_saving(shelf: Shelf) -> None:
    """After SIGKILL the earlier checkpoint is unchanged, and leftovers of the killed save can be cleaned."""
    if shelf.alone:
        pytest.skip("only one process can use this store")
    place = shelf.place()
    save = new_save()
    killed = new_save()
    with shelf.storage.lock(place, save):
        shelf.write(place, save, _SMALL)
        manifest = shelf.publish(place, save)
    for kind in ("holds", "writes"):
        holder = _Holder(shelf, place, killed, kind)
        try:
            if kind == "holds":
                with shelf.storage.lock(place, killed) as locked:
                    assert not locked, "the lock of another process is ignored"
                shelf.storage.clean(place)
                names = shelf.storage.list(place, killed)
                assert "0" in names, "clean deleted files that another process is writing"
        finally:
            holder.kill()
        shelf.has(place, manifest)
        shelf.holds(place, save, _SMALL)
        until = time.monotonic() + _RELEASED
        while _age_and_clean(shelf, place, killed) and time.monotonic() < until:
            time.sleep(0.2)
        left = shelf.storage.list(place, killed)
        assert not left, f"clean left {sorted(left)} of a killed save"
        shelf.holds(place, save, _SMALL)


def _age_and_clean(shelf: Shelf, place: str, save: str) -> bool:
    """Clean up, and return whether files of a save are left."""
    path = shelf.storage.path(place, save)
    if path is not None and path.exists():  # clean keeps directories that are new
        os.utime(path, (time.time() - 10,) * 2)
    shelf.storage.clean(place)
    return bool(shelf.storage.list(place, save))


class _Holder:
    """Another process in the middle of a save."""

    def __init__(self, shelf: Shelf, place: str, save: str, kind: str) -> None:
        source = shelf.file(os.urandom(200_000))
        command = [sys.executable, "-c", _HOLDER, shelf.spec, place, save, str(source), kind]
        path = os.pathsep.join(filter(None, sys.path))
        environ = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != b"0\n":
            self.kill()
            raise AssertionError("another process cannot write to the store")

    def kill(self) -> None:
        """Kill the process, so that it cannot clean up."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


#: The tests by name.
STORAGE_CHECKS: dict[str, Callable[[Shelf], None]] = {
    one.__name__: one
    for one in (
        appears_whole, replaces_whole, publishes_in_one_step, large_files, many_at_once,
        lists_checkpoints, deletes, absent_files, locks, killed_while_saving,
    )
}  # fmt: skip


class StorageSuite:
    """The tests of a `Storage`, for pytest.

    Attributes:
        storage: `module:name` of the class, or of a function that returns a store. It is called
            without arguments, in other processes too.
        place: where tests may write: `{path}` is an unused path of this machine, `{name}` an unused
            name.
        one_process: True if other processes cannot see what one has written, as with memory.
    """

    storage: ClassVar[str] = ""
    place: ClassVar[str] = "{path}"
    one_process: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.storage:
            for name, run in STORAGE_CHECKS.items():
                if not hasattr(cls, f"test_{name}"):
                    setattr(cls, f"test_{name}", _test_of(run))


def _test_of(run: Callable[[Shelf], None]) -> Any:
    def test(self: StorageSuite, tmp_path: Path) -> None:
        run(Shelf(self.storage, self.place, tmp_path, self.one_process))

    test.__doc__ = run.__doc__
    return test
