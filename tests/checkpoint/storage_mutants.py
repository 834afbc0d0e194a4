"""Stores with one fault each, and the check of the suite that must find it."""

from __future__ import annotations

import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

from plain_storage import PlainStorage

from accelerate_checkpoint import MANIFEST, LocalStorage

#: Name of the class -> the check that fails.
MUTANTS: dict[str, str] = {}


def caught_by(check: str):
    def register(cls):
        MUTANTS[cls.__name__] = check
        return cls

    return register


@caught_by("appears_whole")
class PublishesEarly(PlainStorage):
    def write(self, place, name, source, progress):
        super().write(place, name, source, progress)
        Path(place, MANIFEST).write_bytes(b"the manifest")


@caught_by("publishes_in_one_step")
class PacksInPlace(PlainStorage):
    """Has no manifest while it packs the files of a save."""

    def publish(self, place, save, manifest):
        Path(place, MANIFEST).unlink(missing_ok=True)
        with zipfile.ZipFile(Path(place, "packed.zip"), "w") as archive:
            for path in Path(place, save).iterdir():
                archive.write(path)
        super().publish(place, save, manifest)


@caught_by("appears_whole")
class NeverPublishes(PlainStorage):
    def publish(self, place, save, manifest):
        pass


@caught_by("appears_whole")
class LosesAFile(PlainStorage):
    def publish(self, place, save, manifest):
        super().publish(place, save, manifest)
        Path(place, save, "backend_x/rank_0.bin").unlink(missing_ok=True)


@caught_by("appears_whole")
class DropsFolders(PlainStorage):
    def write(self, place, name, source, progress):
        save, _, rest = name.partition("/")
        super().write(place, f"{save}/{rest.replace('/', '_')}", source, progress)


@caught_by("appears_whole")
class ForgetsEmptyFiles(PlainStorage):
    def write(self, place, name, source, progress):
        if source.stat().st_size:
            super().write(place, name, source, progress)


@caught_by("appears_whole")
class ReportsNoProgress(PlainStorage):
    def write(self, place, name, source, progress):
        super().write(place, name, source, lambda count: None)


@caught_by("appears_whole")
class Buffers(PlainStorage):
    """Writes files only when it publishes, and only if the same object does both."""

    def __init__(self):
        self.waiting = []

    def write(self, place, name, source, progress):
        if name.endswith(".lease"):
            super().write(place, name, source, progress)
        else:
            self.waiting.append((place, name, source))
            progress(source.stat().st_size)

    def publish(self, place, save, manifest):
        super().publish(place, save, manifest)
        for place, name, source in self.waiting[:-1]:
            super().write(place, name, source, lambda count: None)


@caught_by("replaces_whole")
class DeletesTheOldOneFirst(PlainStorage):
    def write(self, place, name, source, progress):
        if not name.endswith(".lease"):
            self.delete(place, MANIFEST)
        super().write(place, name, source, progress)


@caught_by("replaces_whole")
class SavesOverEachOther(PlainStorage):
    """Keeps the files of all saves to a place in one folder."""

    def folder(self, name):
        return "save-000000000000/" + name.partition("/")[2] if name.startswith("save-") else name

    def write(self, place, name, source, progress):
        super().write(place, self.folder(name), source, progress)

    def read(self, place, name):
        return super().read(place, self.folder(name))

    def fetch(self, place, name, start, stop):
        return super().fetch(place, self.folder(name), start, stop)

    def list(self, place, folder=""):
        return super().list(place, self.folder(f"{folder}/") if folder else "")


@caught_by("replaces_whole")
class KeepsTheFirstManifest(PlainStorage):
    def publish(self, place, save, manifest):
        if not Path(place, MANIFEST).exists():
            super().publish(place, save, manifest)


@caught_by("large_files")
class Truncates(PlainStorage):
    def write(self, place, name, source, progress):
        super().write(place, name, source, progress)
        os.truncate(Path(place, name), min(source.stat().st_size, 16 << 20))


@caught_by("large_files")
class FetchesOneByteMore(PlainStorage):
    def fetch(self, place, name, start, stop):
        return super().fetch(place, name, start, stop + 1)


@caught_by("many_at_once")
class SharesNames(PlainStorage):
    """Gives two files that are written at once the same name."""

    def write(self, place, name, source, progress):
        if "part_" in name:
            name = (
                f"{name.partition('/')[0]}/part_{int(name.split('_')[-1].split('.')[0]) // 2}.bin"
            )
        super().write(place, name, source, progress)


@caught_by("lists_checkpoints")
class ListsDeletedNames(PlainStorage):
    seen: dict[str, dict[str, int | None]] = {}

    def list(self, place, folder=""):
        known = self.seen.setdefault(f"{place}/{folder}", {})
        known |= super().list(place, folder)
        return dict(known)


@caught_by("lists_checkpoints")
class ListsFilesOnly(PlainStorage):
    def list(self, place, folder=""):
        return {k: v for k, v in super().list(place, folder).items() if v is not None}


@caught_by("deletes")
class DeletesThePlaceForASave(PlainStorage):
    def delete(self, place, name=""):
        super().delete(place, "" if name.startswith("save-") and "/" not in name else name)


@caught_by("deletes")
class FailsToDeleteAbsentNames(PlainStorage):
    def delete(self, place, name=""):
        if not Path(place, name).exists():
            raise FileNotFoundError(name)
        super().delete(place, name)


@caught_by("absent_files")
class ReturnsNothingForAbsentFiles(PlainStorage):
    def fetch(self, place, name, start, stop):
        return super().fetch(place, name, start, stop) if Path(place, name).exists() else b""


@caught_by("absent_files")
class RetriesEveryError(PlainStorage):
    def is_transient(self, error):
        return True


@caught_by("locks")
class IgnoresTheLock(PlainStorage):
    @contextmanager
    def lock(self, place, save):
        yield True


@caught_by("locks")
class NeverUnlocks(PlainStorage):
    held: set[tuple[str, str]] = set()

    @contextmanager
    def lock(self, place, save):
        free = (place, save) not in self.held
        self.held.add((place, save))
        yield free


@caught_by("locks")
class CleansSavesInProgress(PlainStorage):
    def clean(self, place):
        for name in self.list(place):
            if name.startswith("save-"):
                self.delete(place, name)


@caught_by("killed_while_saving")
class LocksInThisProcessOnly(PlainStorage):
    held: set[tuple[str, str]] = set()

    @contextmanager
    def lock(self, place, save):
        free = (place, save) not in self.held
        self.held.add((place, save))
        try:
            yield free
        finally:
            if free:
                self.held.discard((place, save))


@caught_by("killed_while_saving")
class NeverCleans(PlainStorage):
    def clean(self, place):
        pass


@caught_by("appears_whole")
class RenamesEarly(LocalStorage):
    def write(self, place, name, source, progress):
        super().write(place, name, source, progress)
        Path(place).mkdir(exist_ok=True)
        (Path(place) / MANIFEST).write_bytes(b"the manifest")
